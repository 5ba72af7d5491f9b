//! [`OpenUses`]: uses of memory that last longer than a call.
#![forbid(unsafe_code)]

use std::mem::take;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::enqueue::Uses;
use super::footprint::{Access, Footprint, Loans};
use super::name::Name;
use super::outcome::foreign;
use crate::error::{Error, Result};
use crate::memory::allocation::Allocation;
use crate::memory::hazard::Mode;
use crate::runtime::Engine;
use crate::thread::exit;

/// The declared uses, with shares of the memory: the buffers themselves may be moved and dropped.
pub(crate) struct OpenUses<P> {
    name: &'static str,
    held: SmallVec<[Held; 2]>,
    /// Values lent until the end is complete.
    lent: Loans,
    /// What the borrower puts on the stream.
    commands: u32,
    pointers: P,
}

struct Held {
    memory: Arc<Allocation>,
    range: Range<u64>,
    mode: Mode,
    tracked: bool,
}

impl<'a, P> Uses<'a, P> {
    /// Begins uses that last until [`OpenUses::close`]: `submit` orders the stream behind other uses.
    pub(crate) fn open(
        mut self,
        engine: &Arc<Engine>,
        submit: impl FnOnce(&mut Footprint<'a>) -> Result<()>,
    ) -> Result<OpenUses<P>> {
        let commands = self.declared_commands();
        let footprint = &mut self.declared.footprint;
        footprint.check_loans(engine)?;
        for access in footprint.tracked() {
            access.memory.check_is_in_no_graph(&access.range, "lending memory")?;
        }
        let lent = footprint.take_lent();
        footprint.begins_a_loan = true;
        submit(footprint)?;
        let mut held = SmallVec::new();
        footprint.accesses.iter().for_each(|access| held.push(Held::of(access)));
        let Name::Verb(name) = footprint.name() else { unreachable!("uses are named by a text") };
        Ok(OpenUses { name, held, lent, commands, pointers: self.pointers })
    }
}

impl<P> OpenUses<P> {
    pub(crate) fn pointers(&self) -> P
    where
        P: Copy,
    {
        self.pointers
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn commands(&self) -> u32 {
        self.commands
    }

    /// The uses, which are not here any more.
    pub(crate) fn take(&mut self) -> OpenUses<P>
    where
        P: Clone,
    {
        let (held, lent) = (take(&mut self.held), take(&mut self.lent));
        let (name, commands) = (self.name, self.commands);
        OpenUses { name, held, lent, commands, pointers: self.pointers.clone() }
    }

    /// Ends the uses: `submit` enters them behind everything on the stream. If it cannot, and the work may go on, it is unknown
    /// when the memory is free. Returns the failure of the inputs, if there was one meanwhile: the declared outputs have
    /// failed then as well.
    pub(crate) fn close(
        &mut self,
        engine: &Arc<Engine>,
        submit: impl FnOnce(&mut Footprint<'_>) -> Result<()>,
    ) -> Result<Option<Error>> {
        let lent = take(&mut self.lent);
        let mut footprint = self.footprint();
        if !lent.is_empty() {
            footprint.lend_all(lent);
        }
        footprint.ends_a_loan = true;
        submit(&mut footprint).inspect_err(|_| {
            if engine.lost().is_none() || exit::begun() {
                footprint.leak();
            }
        })?;
        let failed = footprint.take_failed_input();
        Ok(failed.map(|error| footprint.poison_entered(error)))
    }

    /// Poisons the declared outputs with another library's error, which is returned as ours.
    pub(crate) fn fail(&self, error: Box<dyn std::error::Error + Send + Sync>) -> Error {
        self.footprint().poison_entered(foreign(self.name.into(), error))
    }

    #[inline]
    fn footprint(&self) -> Footprint<'_> {
        let mut footprint = Footprint::new(self.name);
        self.held.iter().for_each(|held| footprint.accesses.push(held.access()));
        footprint
    }
}

impl Held {
    fn of(access: &Access<'_>) -> Held {
        let Access { memory, ref range, mode, tracked } = *access;
        Held { memory: memory.clone(), range: range.clone(), mode, tracked }
    }

    fn access(&self) -> Access<'_> {
        let Held { ref memory, ref range, mode, tracked } = *self;
        Access { memory, range: range.clone(), mode, tracked }
    }
}
