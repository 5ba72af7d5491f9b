//! [`OpenUses`]: uses of memory that last longer than a call.
//!
//! | the uses | are kept as | while |
//! |---|---|---|
//! | of a loan that borrows | the declared uses | the borrows of the memory last |
//! | of a loan that outlives the borrows | shares of the memory | the buffers may be moved and dropped |
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::enqueue::{DeclaredUses, Uses};
use super::footprint::{Footprint, Name};
use super::lent::LentValues;
use super::outcome::{Dependencies, LateOutcomes, foreign};
use crate::error::{Error, Result};
use crate::memory::accesses::Access;
use crate::memory::allocation::Allocation;
use crate::memory::view::{Span, Tracking};
use crate::runtime::Engine;
use crate::thread::exit;
use gpu_await_protocol::hazard::Mode;

/// The declared uses of a loan.
pub(crate) enum OpenUses<'a> {
    Borrowed(Box<DeclaredUses<'a>>),
    Shared(Box<SharedUses>),
}

/// Uses with shares of the memory.
pub(crate) struct SharedUses {
    name: &'static str,
    held: SmallVec<[Held; 2]>,
    /// Values lent until the loan's end is complete.
    lent: LentValues,
    commands: u32,
}

struct Held {
    memory: Arc<Allocation>,
    range: Range<u64>,
    mode: Mode,
    tracking: Tracking,
}

impl<'a, P> Uses<'a, P> {
    /// Begins uses that last until [`OpenUses::close`]: `submit` orders the stream behind other uses. Returns them, the outcomes that
    /// their inputs depend on, and the slices.
    pub(crate) fn open(
        mut self,
        engine: &Arc<Engine>,
        submit: impl FnOnce(&mut Footprint<'a>) -> Result<()>,
    ) -> Result<(OpenUses<'a>, Option<Box<Dependencies>>, P)> {
        let footprint = &mut self.declared.footprint;
        footprint.check_lent(engine)?;
        for access in footprint.accesses.tracked() {
            access.memory.check_is_in_no_graph(&access.range, "lending memory")?;
        }
        // Before the contents are checked, so that a failure in between is reported too. Nothing else writes the inputs from here on.
        let inputs = LateOutcomes::of_inputs(footprint);
        let lent = footprint.begin_loan();
        submit(footprint)?;
        footprint.loan_has_begun(lent);
        Ok((OpenUses::Borrowed(self.declared), inputs, self.pointers))
    }
}

impl OpenUses<'_> {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            OpenUses::Borrowed(declared) => declared.name(),
            OpenUses::Shared(shared) => shared.name,
        }
    }

    /// How many commands the borrower puts on the stream.
    pub(crate) fn commands(&self) -> u32 {
        match self {
            OpenUses::Borrowed(declared) => declared.commands(),
            OpenUses::Shared(shared) => shared.commands,
        }
    }

    /// Converts to uses with shares of the memory; takes the lent values.
    pub(crate) fn share(&mut self) -> OpenUses<'static> {
        let (name, commands) = (self.name(), self.commands());
        let (held, lent) = self.with_footprint(|footprint| {
            (footprint.accesses.all.iter().map(Held::of).collect(), footprint.take_lent())
        });
        OpenUses::Shared(Box::new(SharedUses { name, held, lent, commands }))
    }

    /// Ends the uses: `submit` enters them behind everything on the stream. If it cannot, and the work may go on, the memory is
    /// leaked. Returns the failure of an input since the loan began, if there was one: then the declared outputs have failed as
    /// well.
    pub(crate) fn close(
        &mut self,
        engine: &Arc<Engine>,
        submit: impl FnOnce(&mut Footprint<'_>) -> Result<()>,
    ) -> Result<Option<Error>> {
        self.with_footprint(|footprint| {
            footprint.end_loan();
            submit(footprint).inspect_err(|_| {
                if engine.state.lost().is_none() || exit::begun() {
                    footprint.leak();
                }
            })?;
            let failed = footprint.take_failed_input();
            Ok(failed.map(|error| footprint.poison_entered(error)))
        })
    }

    /// Poisons the declared outputs with another library's error; returns it as an error of this crate.
    pub(crate) fn fail(&mut self, error: Box<dyn std::error::Error + Send + Sync>) -> Error {
        let error = foreign(self.name().into(), error);
        self.with_footprint(|footprint| footprint.poison_entered(error))
    }

    fn with_footprint<R>(&mut self, f: impl FnOnce(&mut Footprint<'_>) -> R) -> R {
        match self {
            OpenUses::Borrowed(declared) => f(&mut declared.footprint),
            OpenUses::Shared(shared) => {
                let lent = std::mem::take(&mut shared.lent);
                let mut footprint = shared.footprint();
                footprint.loan_has_begun(lent);
                f(&mut footprint)
            }
        }
    }
}

impl SharedUses {
    fn footprint(&self) -> Footprint<'_> {
        let mut footprint = Footprint::new(self.name);
        self.held.iter().for_each(|held| held.is_touched_by(&mut footprint));
        footprint
    }
}

impl DeclaredUses<'_> {
    fn name(&self) -> &'static str {
        let Name::Verb(name) = self.footprint.name() else {
            unreachable!("uses are named by a text")
        };
        name
    }
}

impl Held {
    fn of(access: &Access<'_>) -> Held {
        let Access { memory, ref range, mode, tracking, .. } = *access;
        Held { memory: memory.clone(), range: range.clone(), mode, tracking }
    }

    fn is_touched_by<'a>(&'a self, footprint: &mut Footprint<'a>) {
        let Held { ref memory, ref range, mode, tracking } = *self;
        footprint.touches(&Span { memory, range: range.clone(), tracking, named: None }, mode);
    }
}
