//! Launches, which a replayed batch writes down.
#![forbid(unsafe_code)]

use crate::batch::queue::Queue;
use crate::batch::region::Run;
use crate::submit::{Footprint, KernelLaunch, SubmitError};

impl Queue<'_> {
    /// Submits a launch, or writes it down.
    #[inline]
    pub(crate) fn submit_launch(
        &self,
        footprint: &mut Footprint<'_>,
        launch: &KernelLaunch<'_>,
    ) -> Result<(), SubmitError> {
        match self.run {
            Some(run) => self.launch_in(run, footprint, launch),
            None => self.launch_now(footprint, launch),
        }
    }

    #[inline]
    fn launch_now(
        &self,
        footprint: &mut Footprint<'_>,
        launch: &KernelLaunch<'_>,
    ) -> Result<(), SubmitError> {
        let KernelLaunch { function, shape, args, .. } = launch;
        self.submit(footprint, 1, |raw| Ok(raw.launch(function, shape, args)?))?;
        Ok(())
    }

    #[cold]
    fn launch_in(
        &self,
        run: &Run<'_>,
        footprint: &mut Footprint<'_>,
        launch: &KernelLaunch<'_>,
    ) -> Result<(), SubmitError> {
        let is_listed = launch.can_be_listed()
            && footprint.can_be_listed()
            && !self.stream.engine().options.verify;
        if !is_listed {
            return self.launch_now(footprint, launch);
        }
        if let Some(error) = self.refused {
            return Err(footprint.poison(error.clone()).into());
        }
        if !run.is_open() {
            self.release_last();
        }
        let op = footprint.name();
        let (ticket, ()) = self.note(run.write(footprint, launch).map(|ticket| (ticket, ())))?;
        op.told(self.stream, ticket);
        Ok(())
    }
}
