//! The ways of learning of completions.

use gpu_await::Completion;

pub(crate) const ALL: [Completion; 4] =
    [Completion::Adaptive, Completion::Event, Completion::Word, Completion::Callback];
