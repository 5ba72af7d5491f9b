//! Messages between the supervisor and a process (pure): a header in postcard's format, followed by what it describes.
//!
//! Each is one packet of the socket, so none arrives in part. Headers borrow from the packet and allocate nothing; every number
//! in one that came from the process is checked where it is used.
//!
//! # Invariants
//! 1. Any bytes are a message or none: decoding never panics (`any_packet_is_a_message_or_none`).
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use crate::calls::CallId;
use crate::error::Error;
use crate::leases::{LeaseId, Part};
use crate::system::Executable;

/// The version of these messages. Both sides are the same program, so it changes with that.
pub(crate) const VERSION: u32 = 1;

/// The longest header, in bytes.
pub(crate) const MOST_HEADER: usize = 1 << 10;

/// The longest name of kept memory, in bytes.
pub(crate) const MOST_NAME: usize = 256;

/// The set-up of a process, sent as it starts, with the slabs and the configuration as descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Setup<'m> {
    pub(crate) version: u32,
    pub(crate) executable: Executable,
    pub(crate) service: &'m str,
    pub(crate) request_slab_bytes: u64,
    pub(crate) response_slab_bytes: u64,
    pub(crate) config_bytes: u64,
    pub(crate) terms: ChildTerms,
}

/// How a process is to serve.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct ChildTerms {
    pub(crate) incarnation: u32,
    /// Size of the status area of the response slab, before all leases.
    pub(crate) status_bytes: u64,
    /// How long a response may wait because of payloads that the front holds.
    pub(crate) held_ms: u64,
    pub(crate) most_message_bytes: u32,
    pub(crate) threads: u32,
    pub(crate) hot_us: u32,
    /// `None` for the host device; else the GPU's number among those that the process sees.
    pub(crate) gpu: Option<u32>,
    pub(crate) device_memory_bytes: Option<u64>,
    pub(crate) verify: bool,
    pub(crate) hold_answers: bool,
    pub(crate) allow_mps: bool,
    /// How many operations of the device are logged.
    pub(crate) timeline: u32,
}

/// From the supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToProcess<'m> {
    #[serde(borrow)]
    Setup(Setup<'m>),
    /// Followed by the request. A call that runs alone has the device to itself, from before it begins until it is answered.
    Call { id: CallId, payload: Option<(LeaseId, Part)>, alone: bool },
    /// The payload of an answer is not needed any more.
    Release(LeaseId),
    /// The memory that the process asked for: to fill under this number, or complete, with its descriptors.
    Kept { name: &'m str, generation: u64, fill: bool },
    /// Memory that the process may write from here on, as this generation: with its descriptors, or to be made under the other number. `died` is
    /// the number of a process that died while writing.
    KeptMut { name: &'m str, made: u64, generation: u64, died: Option<u64> },
    /// Finish what is running, take no more calls, and end.
    End,
    /// Send the timeline of the device.
    Timeline,
}

/// How a call went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Verdict {
    /// Followed by the response.
    Answered,
    /// Followed by the reason.
    Failed,
    Panicked,
    /// The request cannot be decoded; followed by the reason.
    Undecodable,
    /// The response cannot be encoded; followed by the reason.
    Unencodable,
    /// The request, or the response, nests too deep.
    TooDeep {
        response: bool,
        limit: u32,
    },
    /// There was no room for the payload of the response: the front holds `held` bytes.
    PayloadsHeld {
        bytes: u64,
        held: u64,
        limit: u64,
    },
    /// The response is too long to be sent.
    TooLarge {
        bytes: u64,
        limit: u64,
    },
}

impl Verdict {
    /// The error of a call that was not answered; `text` is what followed the header.
    pub(crate) fn error(self, text: String) -> Error {
        match self {
            Verdict::Panicked => Error::Panicked(text),
            Verdict::Undecodable => Error::Decode { what: "request", error: text },
            Verdict::Unencodable => Error::Encode { what: "response", error: text },
            Verdict::TooDeep { response, limit } => {
                let what = if response { "response" } else { "request" };
                Error::TooDeep { what, limit }
            }
            Verdict::PayloadsHeld { bytes, held, limit } => {
                Error::PayloadsHeld { bytes, held, limit }
            }
            Verdict::TooLarge { bytes, limit } => {
                Error::TooLarge { what: "a response", bytes, limit }
            }
            Verdict::Failed | Verdict::Answered => Error::Service(text),
        }
    }
}

/// The longest timeline, in bytes.
pub(crate) const MOST_TIMELINE: usize = 64 << 20;

/// The reply to a request for a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum TimelinePart {
    More,
    Last,
    Failed,
}

/// Why a process ends of its own accord.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ending {
    /// It was told to, and has answered everything.
    Done,
    /// Its device is lost.
    Fault,
    /// Its device is lost by an error of the memory itself: what is kept there may be wrong.
    MemoryFault,
    /// Its service did not start: `Service::start` said why.
    StartFailed,
    /// Likewise: it panicked.
    StartPanicked,
    /// Likewise, for lack of device memory.
    OutOfMemory,
    /// The configuration of its service cannot be decoded.
    NoConfiguration,
    /// Its device cannot be opened.
    NoDevice,
    /// Its `main` calls `init` inside of a runtime.
    InsideRuntime,
    /// The system refused something that it needs, with this errno; 0 for an error without one.
    NotStarted { tried: Tried, errno: i32 },
    /// It is not the program that started it, or does not know the service.
    WrongProgram,
    /// It would be a client of MPS.
    UnderMps,
}

/// What a process needs from the system until its service has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Tried {
    Front,
    Socket,
    Watch,
    Program,
    Memory,
    Runtime,
    Reactor,
    Device,
    Service,
}

impl Tried {
    /// The words for it in errors.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Tried::Front => "watching the process that started it",
            Tried::Socket => "taking its socket",
            Tried::Watch => "starting the thread that watches",
            Tried::Program => "opening its own program",
            Tried::Memory => "taking its memory",
            Tried::Runtime => "building its runtime",
            Tried::Reactor => "registering its socket",
            Tried::Device => "starting a thread of its device",
            Tried::Service => "starting its service",
        }
    }

    /// Describes the refusal in this side's words: only the errno came from the process.
    pub(crate) fn refusal(self, errno: i32) -> String {
        match errno {
            0 => format!("{}, in its process", self.text()),
            errno => {
                let error = std::io::Error::from_raw_os_error(errno);
                format!("{}, in its process: {error}", self.text())
            }
        }
    }
}

/// From a process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToSupervisor<'m> {
    Hello {
        version: u32,
        executable: Executable,
    },
    /// It serves; the pool of its device has this many bytes.
    Serving {
        device_bytes: u64,
    },
    Answer {
        id: CallId,
        verdict: Verdict,
        payload: Option<(LeaseId, Part)>,
    },
    /// The payload of a request is not needed any more.
    Returned(LeaseId),
    /// Asks for memory that the supervisor keeps.
    Keep {
        name: &'m str,
    },
    /// It filled and sealed the memory: with its descriptors.
    Sealed {
        name: &'m str,
        generation: u64,
    },
    /// It could not fill the memory.
    NotFilled {
        name: &'m str,
    },
    /// It is ending; followed by the reason.
    Ending(Ending),
    /// Followed by a part of the timeline that was asked for, or by why there is none.
    Timeline(TimelinePart),
    /// Asks for memory that the supervisor keeps, to write it.
    KeepMut {
        name: &'m str,
    },
    /// It made memory to write: with its descriptors.
    Made {
        name: &'m str,
        generation: u64,
    },
    /// It begins to write the memory, or has finished every write it began.
    Writes {
        name: &'m str,
        begins: bool,
    },
}
