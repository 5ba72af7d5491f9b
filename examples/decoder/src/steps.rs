//! Steps: the sequences of one, packed; and the memory in which two are under way at once.
//!
//! A step is one launch of its shape's graph, which reads its input from the host's memory and writes the tokens that it chose there. A graph for
//! each of two halves, with memory of its own for what the host writes and reads, gets the same arguments each time. So while a step runs, the next
//! one is behind it on the stream, and the host reads the tokens of the one in front.
//!
//! | a half | who has its input and output |
//! |---|---|
//! | free | the host |
//! | in flight, from [`Steps::launch`] to the end of [`Steps::collect`] | its step |
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use encoder::up_to;
use gpu_await::{
    DeviceBuffer, DeviceKind, DeviceSlab, Error, Graph, In, InOut, Mapped, Out, PinnedBuffer,
    Result, Stream,
};

use crate::kernels::{Launches, NONE, SEQUENCE, TILE};
use crate::model::{Core, Memory, Model};

/// How a sequence's tokens are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, clap::Args, serde::Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// What logits are divided by, from 1e-4 on; 0 for the most likely token, always
    #[arg(long, default_value = "0")]
    pub temperature: f32,
    /// From so many of the most likely tokens, and those as likely as the last of them; 0 for all
    #[arg(long, default_value = "0")]
    pub top_k: u32,
    /// The same seed gives the same tokens, whatever else a step computes
    #[arg(long, default_value = "0")]
    pub seed: u64,
}

/// A sequence in a step.
#[derive(Clone, Debug)]
pub struct Row {
    /// Whose it is.
    pub request: u64,
    /// Where the device keeps its last token.
    pub slot: u32,
    /// Its prompt; empty for the token that was chosen last.
    pub prompt: Vec<u32>,
    /// Of its first token in this step.
    pub position: u32,
    /// Its blocks of the cache, for all tokens up to the last of this step, at least.
    pub blocks: Arc<[u32]>,
    /// How its next token is chosen.
    pub sampling: Sampling,
}

/// Prompts, or next tokens.
#[derive(Clone, Debug)]
pub struct Step {
    /// All with a prompt, or all without.
    pub rows: Vec<Row>,
}

/// Extents of a step, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) tokens: usize,
    pub(crate) rows: usize,
    /// Of queries; 0 in a step of next tokens.
    pub(crate) tiles: usize,
}

impl Shape {
    /// Tokens: powers of 2 from 16 on, and those between two of them from 64 on.
    fn prompts(tokens: usize, rows: usize) -> Shape {
        let octave = tokens.next_power_of_two().max(16);
        let tokens = if octave > 64 && tokens <= octave / 4 * 3 { octave / 4 * 3 } else { octave };
        let rows = (0..).map(|power| 8usize.pow(power)).find(|most| *most >= rows);
        let rows = rows.unwrap_or(usize::MAX);
        Shape { tokens, rows, tiles: tokens / TILE + rows }
    }

    /// Rows: 1, 2, 4, 8, and multiples of 16.
    fn next(rows: usize) -> Shape {
        let rows = if rows <= 8 { rows.next_power_of_two() } else { rows.next_multiple_of(16) };
        Shape { tokens: rows, rows, tiles: 0 }
    }

    fn of(step: &Step) -> Shape {
        match step.tokens() {
            0 => Shape::next(step.rows.len()),
            tokens => Shape::prompts(tokens, step.rows.len()),
        }
    }

    fn input_len(&self, row_len: usize) -> usize {
        3 * self.tokens + self.rows * row_len + 2 * self.tiles
    }

    /// Packs a step. What is left of the tokens, rows and tiles belongs to no sequence.
    fn pack(&self, step: &Step, row_len: usize, to: &mut [u32]) {
        to.fill(0);
        let (ids, rest) = to.split_at_mut(self.tokens);
        let (positions, rest) = rest.split_at_mut(self.tokens);
        let (slots, rest) = rest.split_at_mut(self.tokens);
        let (rows, tiles) = rest.split_at_mut(self.rows * row_len);
        tiles.fill(NONE);
        rows.chunks_exact_mut(row_len).for_each(|row| row[0] = NONE);
        let mut each_tile = tiles.chunks_exact_mut(2);
        let mut start = 0;
        for (number, row) in step.rows.iter().enumerate() {
            let chosen = [NONE];
            let tokens = if row.prompt.is_empty() { &chosen } else { &row.prompt[..] };
            let here = start..start + tokens.len();
            ids[here.clone()].copy_from_slice(tokens);
            positions[here.clone()].iter_mut().zip(row.position..).for_each(|(to, at)| *to = at);
            slots[here].fill(row.slot);
            for (first, tile) in (0..tokens.len()).step_by(TILE).zip(&mut each_tile) {
                tile.copy_from_slice(&[number as u32, first as u32]);
            }
            let Sampling { temperature, top_k, seed } = row.sampling;
            let (head, table) = rows[number * row_len..][..row_len].split_at_mut(SEQUENCE);
            head.copy_from_slice(&[
                row.slot,
                start as u32,
                tokens.len() as u32,
                row.position,
                temperature.to_bits(),
                top_k,
                seed as u32,
                (seed >> 32) as u32,
            ]);
            table.fill(NONE);
            table[..row.blocks.len()].copy_from_slice(&row.blocks);
            start += tokens.len();
        }
    }
}

impl Step {
    /// Of all prompts; 0 in a step of next tokens.
    fn tokens(&self) -> usize {
        self.rows.iter().map(|row| row.prompt.len()).sum()
    }
}

/// What fits.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Limits {
    /// Sequences at once
    #[arg(long, global = true, value_name = "N", default_value = "64", value_parser = up_to(4096))]
    pub streams: usize,
    /// Tokens of the prompts that start in one step
    #[arg(long, global = true, value_name = "N", default_value = "8192", value_parser = up_to(1 << 20))]
    pub prompt_tokens: usize,
    /// Blocks of the cache, of 16 tokens each; 0, for the program, is what all sequences can need
    #[arg(long, global = true, value_name = "N", default_value = "0")]
    pub blocks: usize,
    /// Requests that have not started; further ones are refused
    #[arg(long, global = true, value_name = "N", default_value = "1024", value_parser = up_to(1 << 20))]
    pub waiting: usize,
}

/// A stream with the cache, and memory for two steps.
pub struct Steps<T: Launches> {
    core: Arc<Core<T>>,
    stream: Stream,
    slab: DeviceSlab<T>,
    scratch: DeviceBuffer<T>,
    logits: DeviceBuffer<f32>,
    chosen: DeviceBuffer<u32>,
    halves: [Half<T>; 2],
    /// Halves, the oldest step first.
    in_flight: VecDeque<(usize, Step)>,
    next: usize,
}

struct Half<T: Launches> {
    /// In host memory, which kernels use in place: a step is one launch, without copies around it.
    input: Mapped<u32>,
    out: Mapped<u32>,
    graphs: HashMap<Shape, Graph<Slots<T>>>,
}

/// The packed step, the cache, scratch memory, logits, chosen tokens by slot and by row.
type Slots<T> = (In<u32>, InOut<T>, InOut<T>, InOut<f32>, InOut<u32>, Out<u32>);

impl<T: Launches> Steps<T> {
    /// Makes memory for steps within the limits.
    ///
    /// # Errors
    /// Out of device memory; the device is lost or closed.
    pub async fn new(model: &Model<T>, limits: &Limits) -> Result<Steps<T>> {
        let (core, device) = (model.0.clone(), &model.0.device);
        let stream = device.stream()?;
        let most = Shape::prompts(limits.prompt_tokens, limits.streams);
        let most = Shape { tokens: most.tokens.max(Shape::next(limits.streams).rows), ..most };
        let half = async || {
            Ok::<_, Error>(Half {
                input: device.pinned_async(most.input_len(core.row_len())).await?.into_mapped(),
                out: device.pinned_async(most.rows).await?.into_mapped(),
                graphs: HashMap::new(),
            })
        };
        // Zeros: rows of no sequence are computed as well, and need a value.
        Ok(Steps {
            slab: stream.slab(limits.blocks, core.block_len()).queued()?,
            scratch: stream.zeros(core.scratch_len(most)).queued()?,
            logits: stream.zeros(core.logits_len(most)).queued()?,
            chosen: stream.zeros(limits.streams).queued()?,
            halves: [half().await?, half().await?],
            in_flight: VecDeque::new(),
            next: 0,
            stream,
            core,
        })
    }

    /// Puts a step on the stream, behind the one in front of it, and does not wait for it. Blocks and slots of a step are free for the next one as soon
    /// as this returns.
    ///
    /// # Panics
    /// Two steps are in flight.
    ///
    /// # Errors
    /// More than the limits; out of memory; the device is lost or closed.
    pub async fn launch(&mut self, step: Step) -> Result<()> {
        assert!(self.in_flight.len() < self.halves.len(), "two steps are in flight");
        let shape = Shape::of(&step);
        self.prepare(shape).await?;
        let Steps { core, stream, slab, scratch, logits, chosen, halves, next, .. } = self;
        let Half { input, out, graphs } = &mut halves[*next];
        let len = shape.input_len(core.row_len());
        // Whether there is room, before the slice below.
        input.slice(..len)?;
        shape.pack(&step, core.row_len(), &mut input.host().await?[..len]);
        let input = input.slice(..len)?;
        let mut scratch = scratch.slice_mut(..core.scratch_len(shape))?;
        let mut logits = logits.slice_mut(..core.logits_len(shape))?;
        let mut out = out.view_mut();
        let mut out = out.slice_mut(..shape.rows)?;
        let arguments = (&input, slab, &mut scratch, &mut logits, chosen, &mut out);
        graphs[&shape].launch(stream, arguments).queued()?;
        self.in_flight.push_back((self.next, step));
        self.next = 1 - self.next;
        Ok(())
    }

    /// How many steps were launched and not collected: two at most.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Waits for the oldest step in flight; returns it, with a token for each of its rows, `u32::MAX` where a logit is not finite. `None` if there is none. Dropped, the future leaves the step in
    /// flight.
    ///
    /// # Errors
    /// The step failed; the device is lost or closed.
    pub async fn collect(&mut self) -> Result<Option<(Step, Vec<u32>)>> {
        let Some((half, step)) = self.in_flight.front() else { return Ok(None) };
        let tokens = self.halves[*half].out.host().await?[..step.rows.len()].to_vec();
        Ok(self.in_flight.pop_front().map(|(_, step)| (step, tokens)))
    }

    /// Waits until the device is lost.
    pub async fn lost(&self) -> Error {
        self.core.device.lost().await
    }

    /// The logits of the step that was launched last, a row for each sequence.
    ///
    /// # Errors
    /// The device is lost or closed.
    pub async fn logits(&self, rows: usize) -> Result<Vec<Vec<f32>>> {
        let len = self.core.config.padded_vocabulary();
        let all: PinnedBuffer<f32> =
            self.stream.download(&self.logits.slice(..rows * len)?).await?;
        Ok(all.chunks(len).map(|row| row[..self.core.config.vocab_size].to_vec()).collect())
    }

    /// Makes the graphs of a shape, for both halves, if there are none.
    async fn prepare(&mut self, shape: Shape) -> Result<()> {
        if self.halves[0].graphs.contains_key(&shape) {
            return Ok(());
        }
        let plans = Arc::new(self.core.plans(shape).await?);
        for half in &mut self.halves {
            let graph = self.core.device.graph::<Slots<T>, _, _>(
                (self.core.clone(), plans.clone(), shape),
                |q, (core, plans, shape), (input, slab, scratch, logits, chosen, out)| {
                    let memory = Memory { input, slab, scratch, logits, chosen, out };
                    core.forward(q, (*shape, plans), memory)
                },
            );
            half.graphs.insert(shape, graph);
        }
        Ok(())
    }

    /// On a GPU launches each shape within the limits once, which compiles its graphs. Before serving: that takes milliseconds each.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub async fn warm(&mut self, limits: &Limits) -> Result<()> {
        if self.core.device.kind() == DeviceKind::Host {
            return Ok(());
        }
        let row = |prompt| Row {
            request: 0,
            slot: NONE,
            prompt,
            position: 0,
            blocks: [].into(),
            sampling: Sampling::default(),
        };
        let mut shapes: Vec<_> = (1..=limits.streams).map(|rows| (0, Shape::next(rows))).collect();
        for rows in [1, 8, 64].into_iter().filter(|rows| *rows < 8 * limits.streams) {
            let rows = rows.min(limits.streams);
            let tokens =
                (rows..=limits.prompt_tokens).map(|tokens| (tokens, Shape::prompts(tokens, rows)));
            shapes.extend(tokens);
        }
        shapes.dedup_by_key(|(_, shape)| *shape);
        for (tokens, shape) in shapes {
            let rows = shape.rows.min(limits.streams);
            for _ in 0..2 {
                let len =
                    |number: usize| if number == 0 { tokens - (rows - 1).min(tokens) } else { 1 };
                let prompt = |number| if tokens == 0 { vec![] } else { vec![0; len(number)] };
                let rows = (0..rows).map(|number| row(prompt(number))).collect();
                self.launch(Step { rows }).await?;
                self.collect().await?;
            }
        }
        Ok(())
    }
}
