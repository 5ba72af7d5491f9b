//! Runs a program, step by step, beside its model.

use std::time::Duration;

use futures::executor::block_on;
use gpu_await::{Completion, ErrorKind, LaunchConfig, Op, PinnedBuffer, Stream};

use super::model::{self, Contents, join};
use super::program::{self, Action, BUFFERS, LEN, Place, Point, Then};
use super::watched::{Expect, Got, ON_PURPOSE};
use super::world::{Check, Fault, World};

/// Runs the steps, each with its number; what went wrong first.
pub(crate) fn run(mode: Completion, program: &[(usize, Action)]) -> Check {
    World::new(mode).run(program)
}

/// The calls of the driver that the steps make.
pub(crate) fn trace(mode: Completion, program: &[(usize, Action)]) -> Vec<&'static str> {
    let mut world = World::new(mode);
    world.trace = Some(Vec::new());
    // What goes wrong is for others to say.
    world.run(program).ok();
    world.trace.take().unwrap_or_default()
}

fn unit(_: ()) -> Got {
    Got::Unit
}

fn floats(buffer: PinnedBuffer<f32>) -> Got {
    Got::Floats(buffer.to_vec())
}

impl World {
    fn run(&mut self, program: &[(usize, Action)]) -> Check {
        for (number, action) in program {
            let checked = self.act(action).and_then(|()| self.check());
            checked.map_err(|what| format!("step {number}, {action:?}: {what}"))?;
        }
        self.look_at_all()
            .and_then(|()| self.finish())
            .map_err(|what| format!("at the end: {what}"))
    }

    fn act(&mut self, action: &Action) -> Check {
        match action {
            Action::OpenStream { stream } => self.open_stream(*stream),
            Action::DropStream { stream } => {
                self.streams[*stream] = None;
                Ok(())
            }
            Action::Make { stream, buffer, contents, then } => {
                self.on(*stream, |world, on| world.make(on, *stream, *buffer, *contents, *then))
            }
            Action::DropBuffer { buffer } => {
                self.buffers[*buffer] = None;
                Ok(())
            }
            Action::Fill { stream, to, value, then } => {
                self.on(*stream, |world, on| world.fill(on, *stream, to, *value, *then))
            }
            Action::Scale { stream, to, then } => {
                self.on(*stream, |world, on| world.scale(on, *stream, to, *then))
            }
            Action::Axpy { stream, from, to, then } => {
                self.on(*stream, |world, on| world.two(on, *stream, from, to, *then, true))
            }
            Action::Copy { stream, from, to, then } => {
                self.on(*stream, |world, on| world.two(on, *stream, from, to, *then, false))
            }
            Action::UploadInto { stream, to, value, then } => {
                self.on(*stream, |world, on| world.upload_into(on, *stream, to, *value, *then))
            }
            Action::Download { stream, from, pageable, then } => {
                self.on(*stream, |world, on| world.download(on, *stream, from, *pageable, *then))
            }
            Action::HostFn { stream, panics, then } => {
                self.on(*stream, |world, on| world.host_fn(on, *stream, *panics, *then))
            }
            Action::Batch { stream, from, to, value, then } => {
                self.on(*stream, |world, on| world.batch(on, *stream, from, to, *value, *then))
            }
            Action::Timed { stream, to, value, then } => {
                self.on(*stream, |world, on| world.timed(on, *stream, to, *value, *then))
            }
            Action::Launches { stream, from, to, as_graph, then } => self
                .on(*stream, |world, on| world.launches(on, *stream, from, to, *as_graph, *then)),
            Action::Pair { streams, join, then } => self.pair(*streams, *join, *then),
            Action::Record { stream, event } => {
                self.on(*stream, |world, on| world.record(on, *stream, *event))
            }
            Action::DropEvent { event } => {
                self.events[*event] = None;
                Ok(())
            }
            Action::Wait { stream, on: point } => {
                self.on(*stream, |world, on| world.wait(on, *stream, *point))
            }
            Action::Done { of } => self.done(*of),
            _ => self.observe(action),
        }
    }

    /// What puts nothing on a stream.
    fn observe(&mut self, action: &Action) -> Check {
        let chosen = |op: &usize| op.checked_rem(self.ops.len());
        match action {
            Action::Poll { op, panics } => {
                let Some(at) = chosen(op) else { return Ok(()) };
                let outcome = self.ops[at].poll(*panics);
                self.settle(at, outcome).map(drop)
            }
            Action::TryTake { op } => {
                let Some(at) = chosen(op) else { return Ok(()) };
                let outcome = self.ops[at].try_take();
                self.settle(at, outcome).map(drop)
            }
            Action::IsComplete { op } => {
                let Some(at) = chosen(op) else { return Ok(()) };
                let kept = &self.ops[at];
                if kept.op.is_complete() && kept.sleeps() {
                    return Err(format!("{} is complete, its task was not woken", kept.name));
                }
                Ok(())
            }
            Action::DropOp { op } => {
                let Some(at) = chosen(op) else { return Ok(()) };
                drop(self.ops.swap_remove(at));
                Ok(())
            }
            Action::Leak { op } => {
                let Some(at) = chosen(op) else { return Ok(()) };
                let kept = self.ops.swap_remove(at);
                self.leaked.push(kept);
                Ok(())
            }
            _ => self.drive(action),
        }
    }

    /// What the device, its driver and the machine do.
    fn drive(&mut self, action: &Action) -> Check {
        match action {
            Action::Step { choices } => {
                for choice in choices {
                    let _ = self.step.step(usize::from(*choice));
                }
            }
            Action::Idle => {
                self.step.run_until_idle();
                return self.check_awake();
            }
            Action::Advance { us } => self.step.advance(Duration::from_micros((*us).into())),
            Action::Fail { call, nth, kind, after_effect } => {
                // Counted from here, as the wrapper does.
                self.struck();
                self.handle.record();
                if *after_effect {
                    self.handle.fail_nth_after_effect(*call, *nth, *kind);
                } else {
                    self.handle.fail_nth(*call, *nth, *kind);
                }
                let (call, countdown, kind) = (*call, *nth, *kind);
                self.faults.push(Fault { call, countdown, kind, after_effect: *after_effect });
            }
            Action::Lose => {
                self.may_be_lost = true;
                self.handle.lose_device(ON_PURPOSE);
            }
            Action::Trap { stream } => {
                return self.on(*stream, |world, on| {
                    // Refused after its effect, it strikes all the same.
                    world.may_be_lost = true;
                    let op = on.launch(&world.trap, LaunchConfig::new(1, 1), ());
                    world.judge("trap", op.queued(), Ok(())).map(drop)
                });
            }
            Action::Close => {
                self.closed = true;
                let result = block_on(self.device.close(Duration::ZERO));
                let right = match &result {
                    Ok(()) => true,
                    Err(error) if error.kind() == ErrorKind::TimedOut => true,
                    Err(_) => return self.judge_look("close", result).map(drop),
                };
                debug_assert!(right);
            }
            Action::Stats => drop(self.device.stats()),
            _ => unreachable!("done by `act` and `observe`"),
        }
        Ok(())
    }

    fn on(&mut self, stream: usize, f: impl FnOnce(&mut World, &Stream) -> Check) -> Check {
        match self.streams[stream].clone() {
            Some(stream) => f(self, &stream),
            None => Ok(()),
        }
    }

    /// Downloads every buffer.
    fn look_at_all(&mut self) -> Check {
        let Some(stream) = self.streams.iter().position(Option::is_some) else { return Ok(()) };
        for buffer in 0..BUFFERS {
            let from = Place { buffer, start: 0, end: LEN };
            self.on(stream, |world, on| world.download(on, stream, &from, false, Then::Keep))?;
        }
        self.check()
    }

    fn open_stream(&mut self, stream: usize) -> Check {
        let made = self.device.stream();
        if let Ok(made) = self.judge("stream", made, Ok(()))? {
            self.streams[stream] = Some(made);
            self.frontiers[stream].clear();
        }
        Ok(())
    }

    fn make(
        &mut self,
        on: &Stream,
        stream: usize,
        buffer: usize,
        contents: program::Contents,
        then: Then,
    ) -> Check {
        let (op, contents) = match contents {
            program::Contents::Empty => (on.empty::<f32>(LEN), Contents::unwritten()),
            program::Contents::Full(value) => {
                (on.full(LEN, f32::from(value)), Contents::full(value.into()))
            }
            program::Contents::Upload(value) => {
                (on.upload(vec![f32::from(value); LEN]), Contents::full(value.into()))
            }
        };
        if then == Then::Go {
            if let Ok(made) = self.judge("make", op.queued(), Ok(()))? {
                self.buffers[buffer] = Some((made, contents));
            }
        } else if let Ok(op) = self.judge("make", op.submitted(), Ok(()))? {
            let frontier = self.frontiers[stream].clone();
            self.keep("make", op, Got::Buffer, Expect::Buffer(contents, buffer), frontier);
        }
        Ok(())
    }

    /// Judges an operation whose future says only that it is complete.
    pub(super) fn end(
        &mut self,
        name: &str,
        stream: usize,
        op: Op<()>,
        must: Result<(), ErrorKind>,
        then: Then,
    ) -> Check<Result<(), ErrorKind>> {
        if then == Then::Go {
            return self.judge(name, op.queued(), must);
        }
        let judged = self.judge(name, op.submitted(), must)?;
        Ok(judged.map(|op| {
            let frontier = self.frontiers[stream].clone();
            self.keep(name, op, unit, Expect::Unit, frontier);
        }))
    }

    fn fill(&mut self, on: &Stream, s: usize, to: &Place, value: u8, then: Then) -> Check {
        let Some((mut buffer, mut contents)) = self.buffers[to.buffer].take() else {
            return Ok(());
        };
        let op = {
            let mut view = buffer.slice_mut(to.start..to.end).map_err(|e| e.to_string())?;
            on.fill(&mut view, f32::from(value))
        };
        let outcome = self.end("fill", s, op, Ok(()), then)?;
        contents.write(to, outcome, |_, _| value.into());
        self.buffers[to.buffer] = Some((buffer, contents));
        Ok(())
    }

    fn scale(&mut self, on: &Stream, s: usize, to: &Place, then: Then) -> Check {
        let Some((mut buffer, mut contents)) = self.buffers[to.buffer].take() else {
            return Ok(());
        };
        let op = {
            let mut view = buffer.slice_mut(to.start..to.end).map_err(|e| e.to_string())?;
            self.scale.launch(on, 0.5, &mut view)
        };
        let must = contents.unreadable(to).map_or(Ok(()), Err);
        let outcome = self.end("scale", s, op, must, then)?;
        contents.write(to, outcome, |_, x| 0.5 * x);
        self.buffers[to.buffer] = Some((buffer, contents));
        Ok(())
    }

    /// A copy, or an `axpy`, from one buffer to another.
    fn two(
        &mut self,
        on: &Stream,
        s: usize,
        from: &Place,
        to: &Place,
        then: Then,
        adds: bool,
    ) -> Check {
        let (Some((source, known)), true) =
            (self.buffers[from.buffer].take(), from.buffer != to.buffer)
        else {
            return Ok(());
        };
        if let Some((mut target, mut contents)) = self.buffers[to.buffer].take() {
            let op = {
                let x = source.slice(from.start..from.end).map_err(|e| e.to_string())?;
                let mut y = target.slice_mut(to.start..to.end).map_err(|e| e.to_string())?;
                if adds { self.axpy.launch(on, 0.5, &x, &mut y) } else { on.copy(&x, &mut y) }
            };
            let updated = contents.unreadable(to).filter(|_| adds);
            let must = known.unreadable(from).or(updated).map_or(Ok(()), Err);
            let outcome = self.end(if adds { "axpy" } else { "copy" }, s, op, must, then)?;
            let x = known.read(from);
            let result =
                |index: usize, y: f32| if adds { 0.5f32.mul_add(x[index], y) } else { x[index] };
            contents.write(to, outcome, result);
            self.buffers[to.buffer] = Some((target, contents));
        }
        self.buffers[from.buffer] = Some((source, known));
        Ok(())
    }

    fn upload_into(&mut self, on: &Stream, s: usize, to: &Place, value: u8, then: Then) -> Check {
        let Some((mut buffer, mut contents)) = self.buffers[to.buffer].take() else {
            return Ok(());
        };
        let pinned = on.pinned::<f32>(to.end - to.start);
        if let Ok(mut pinned) = self.judge_look("pinned", pinned)? {
            pinned.fill(value.into());
            let op = {
                let mut view = buffer.slice_mut(to.start..to.end).map_err(|e| e.to_string())?;
                on.upload_into(pinned, &mut view)
            };
            let judged = self.judge("upload_into", op.submitted(), Ok(()))?;
            contents
                .write(to, judged.as_ref().map(drop).map_err(|kind| *kind), |_, _| value.into());
            if let (Ok(op), Then::Keep) = (judged, then) {
                let expect = Expect::Floats(vec![value.into(); to.end - to.start]);
                let frontier = self.frontiers[s].clone();
                self.keep("upload_into", op, floats, expect, frontier);
            }
        }
        self.buffers[to.buffer] = Some((buffer, contents));
        Ok(())
    }

    fn download(
        &mut self,
        on: &Stream,
        s: usize,
        from: &Place,
        pageable: bool,
        then: Then,
    ) -> Check {
        let Some((buffer, contents)) = &self.buffers[from.buffer] else { return Ok(()) };
        let must = contents.unreadable(from).map_or(Ok(()), Err);
        let expect = Expect::Floats(contents.read(from));
        let frontier = self.frontiers[s].clone();
        let view = buffer.slice(from.start..from.end).map_err(|e| e.to_string())?;
        if pageable {
            let op = on.download_vec(&view).submitted();
            if let (Ok(op), Then::Keep) = (self.judge("download_vec", op, must)?, then) {
                self.keep("download_vec", op, Got::Floats, expect, frontier);
            }
        } else {
            let op = on.download(&view).submitted();
            if let (Ok(op), Then::Keep) = (self.judge("download", op, must)?, then) {
                self.keep("download", op, floats, expect, frontier);
            }
        }
        Ok(())
    }

    /// The closure of a new host function of a stream, and its number.
    pub(crate) fn function(
        &self,
        s: usize,
        panics: bool,
    ) -> (usize, impl FnOnce() -> model::Payload + Send + 'static) {
        let id = self.ledger.function();
        let (ledger, payload) = (self.ledger.clone(), self.ledger.payload(id));
        let frontier = self.frontiers[s].clone();
        let function = move || {
            ledger.run(id, &frontier);
            if panics {
                std::panic::resume_unwind(Box::new(ON_PURPOSE));
            }
            payload
        };
        (id, function)
    }

    fn host_fn(&mut self, on: &Stream, s: usize, panics: bool, then: Then) -> Check {
        let (id, function) = self.function(s, panics);
        let op = on.host_fn(function).submitted();
        let Ok(op) = self.judge("host_fn", op, Ok(()))? else { return Ok(()) };
        self.frontiers[s].insert(on.id(), id);
        if then == Then::Keep {
            let expect = if panics { Expect::Panic } else { Expect::Ids(vec![id]) };
            let frontier = self.frontiers[s].clone();
            self.keep("host_fn", op, |payload| Got::Ids(vec![payload.id]), expect, frontier);
        }
        Ok(())
    }

    fn record(&mut self, on: &Stream, s: usize, event: usize) -> Check {
        if let Ok(made) = self.judge_look("record", on.record())? {
            self.events[event] = Some((made, self.frontiers[s].clone()));
        }
        Ok(())
    }

    fn wait(&mut self, on: &Stream, s: usize, point: Point) -> Check {
        let (op, frontier) = match point {
            Point::Stream(other) => match &self.streams[other] {
                Some(stream) => (on.wait(stream), self.frontiers[other].clone()),
                None => return Ok(()),
            },
            Point::Event(event) => match &self.events[event] {
                Some((event, frontier)) => (on.wait(event), frontier.clone()),
                None => return Ok(()),
            },
            Point::Op(op) => match op.checked_rem(self.ops.len()) {
                Some(at) => (self.ops[at].op.waited_by(on), self.ops[at].frontier.clone()),
                None => return Ok(()),
            },
            Point::Device => return Ok(()),
        };
        if self.judge_look("wait", op.queued())?.is_ok() {
            join(&mut self.frontiers[s], &frontier);
        }
        Ok(())
    }

    fn done(&mut self, of: Point) -> Check {
        let (op, frontier) = match of {
            Point::Stream(stream) => match &self.streams[stream] {
                Some(on) => (on.done(), self.frontiers[stream].clone()),
                None => return Ok(()),
            },
            Point::Event(event) => match &self.events[event] {
                Some((event, frontier)) => (event.done(), frontier.clone()),
                None => return Ok(()),
            },
            Point::Op(_) => return Ok(()),
            Point::Device => {
                let mut all = model::Frontier::new();
                let live = self.streams.iter().zip(&self.frontiers);
                live.filter(|(on, _)| on.is_some()).for_each(|(_, known)| join(&mut all, known));
                (self.device.done(), all)
            }
        };
        if let Ok(op) = self.judge_look("done", op.submitted())? {
            self.keep("done", op, unit, Expect::Unit, frontier);
        }
        Ok(())
    }
}
