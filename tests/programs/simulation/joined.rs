//! Several operations as one future.

use gpu_await::{PinnedBuffer, Queue, Result, Stream, View, ViewMut, kernels};

use super::model::{self, join};
use super::program::{Join, Place, Then};
use super::watched::{Expect, Got};
use super::world::{Check, World};

/// `y = 2 a (y + a x)`. The first launch reads all that is read: if it is refused, nothing was written down.
pub(crate) fn mixed(
    q: &Queue<'_>,
    (axpy, scale): (&kernels::axpy, &kernels::scale),
    x: &View<'_, f32>,
    y: &mut ViewMut<'_, f32>,
    a: f32,
) -> Result<()> {
    axpy.launch(q, a, x, y)?;
    scale.launch(q, a, y)?;
    scale.launch(q, 2.0, y)
}

impl World {
    /// A fill, a download and a host function as one future.
    pub(crate) fn batch(
        &mut self,
        on: &Stream,
        s: usize,
        from: &Place,
        to: &Place,
        value: u8,
        then: Then,
    ) -> Check {
        let mut wrong = Ok(());
        let mut seen = None;
        let op = on.batch(|queue| {
            wrong = self.fill_in(queue, to, value);
            let Some((buffer, contents)) = &self.buffers[from.buffer] else {
                return Ok((None, None));
            };
            let view = buffer.slice(from.start..from.end)?;
            let must = contents.unreadable(from).map_or(Ok(()), Err);
            let expected = contents.read(from);
            let downloaded = queue.download(&view);
            let judged = self.judge(
                "download in a batch",
                downloaded.as_ref().map(drop).map_err(Clone::clone),
                must,
            );
            wrong = std::mem::replace(&mut wrong, Ok(())).and(judged.map(drop));
            let downloaded = downloaded?;
            let (id, function) = self.function(s, false);
            let called = queue.host_fn(function);
            let judged = self.judge(
                "host_fn in a batch",
                called.as_ref().map(drop).map_err(Clone::clone),
                Ok(()),
            );
            wrong = std::mem::replace(&mut wrong, Ok(())).and(judged.map(drop));
            let called = called?;
            self.frontiers[s].insert(on.id(), id);
            seen = Some((expected, id));
            Ok((Some(downloaded), Some(called)))
        });
        wrong?;
        // Its parts were judged.
        let (Ok(op), Some((expected, id)), Then::Keep) = (op.submitted(), seen, then) else {
            return Ok(());
        };
        let frontier = self.frontiers[s].clone();
        let got = |(floats, payload): (Option<PinnedBuffer<f32>>, Option<model::Payload>)| {
            let floats = floats.map_or_else(Vec::new, |floats| floats.to_vec());
            Got::Both(floats, payload.map_or(usize::MAX, |payload| payload.id))
        };
        self.keep("batch", op, got, Expect::Both(expected, id), frontier);
        Ok(())
    }

    fn fill_in(&mut self, queue: &Queue<'_>, to: &Place, value: u8) -> Check {
        let Some((mut buffer, mut contents)) = self.buffers[to.buffer].take() else {
            return Ok(());
        };
        let filled = {
            let mut view = buffer.slice_mut(to.start..to.end).map_err(|e| e.to_string())?;
            queue.fill(&mut view, f32::from(value))
        };
        let outcome = self.judge("fill in a batch", filled, Ok(()))?;
        contents.write(to, outcome, |_, _| value.into());
        self.buffers[to.buffer] = Some((buffer, contents));
        Ok(())
    }

    pub(crate) fn timed(
        &mut self,
        on: &Stream,
        s: usize,
        to: &Place,
        value: u8,
        then: Then,
    ) -> Check {
        let mut wrong = Ok(());
        let op = on.timed(|queue| {
            wrong = self.fill_in(queue, to, value);
            Ok(())
        });
        wrong?;
        let op = self.judge_look("timed", op.submitted())?;
        if let (Ok(op), Then::Keep) = (op, then) {
            let frontier = self.frontiers[s].clone();
            self.keep("timed", op, |((), _)| Got::Unit, Expect::Unit, frontier);
        }
        Ok(())
    }

    /// Three launches as a list, or as a graph: `y = 2 / 2 (y + x / 2)`.
    pub(crate) fn launches(
        &mut self,
        on: &Stream,
        s: usize,
        from: &Place,
        to: &Place,
        as_graph: bool,
        then: Then,
    ) -> Check {
        let Some((source, known)) = self.buffers[from.buffer].take() else { return Ok(()) };
        if let Some((mut target, mut contents)) = self.buffers[to.buffer].take() {
            let op = {
                let x = source.slice(from.start..from.end).map_err(|e| e.to_string())?;
                let mut y = target.slice_mut(to.start..to.end).map_err(|e| e.to_string())?;
                let World { graph, region, axpy, scale, .. } = self;
                match (graph, as_graph) {
                    (Some(graph), true) => graph.launch(on, (&x, &mut y, 0.5)),
                    _ => on.replay(region, |q| mixed(q, (axpy, scale), &x, &mut y, 0.5)),
                }
            };
            let must = known.unreadable(from).or(contents.unreadable(to)).map_or(Ok(()), Err);
            let outcome = self.end("launches", s, op, must, then)?;
            let x = known.read(from);
            contents.write(to, outcome, |index, y| 2.0 * (0.5 * 0.5f32.mul_add(x[index], y)));
            self.buffers[to.buffer] = Some((target, contents));
        }
        self.buffers[from.buffer] = Some((source, known));
        Ok(())
    }

    /// Host functions on two streams, as one future.
    pub(crate) fn pair(&mut self, streams: [usize; 2], how: Join, then: Then) -> Check {
        let (mut ops, mut ids) = (Vec::new(), Vec::new());
        let mut frontier = model::Frontier::new();
        for s in streams {
            let Some(on) = self.streams[s].clone() else { return Ok(()) };
            let (id, function) = self.function(s, false);
            let op = on.host_fn(function).submitted();
            let Ok(op) = self.judge("host_fn of a pair", op, Ok(()))? else { return Ok(()) };
            self.frontiers[s].insert(on.id(), id);
            join(&mut frontier, &self.frontiers[s]);
            ops.push(op);
            ids.push(id);
        }
        let expect = Expect::Ids(ids);
        match (how, then) {
            (_, Then::Go) => drop(gpu_await::join_all(ops)),
            (Join::All, Then::Keep) => {
                let got = |payloads: Vec<model::Payload>| {
                    Got::Ids(payloads.iter().map(|payload| payload.id).collect())
                };
                self.keep("join_all", gpu_await::join_all(ops), got, expect, frontier);
            }
            (Join::And, Then::Keep) => {
                let second = ops.pop().expect("two");
                let op = ops.pop().expect("two").and(second);
                let got = |(a, b): (model::Payload, model::Payload)| Got::Ids(vec![a.id, b.id]);
                self.keep("and", op, got, expect, frontier);
            }
        }
        Ok(())
    }
}
