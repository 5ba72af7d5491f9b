//! Blocks at any addresses as one kernel argument: a table of addresses, which the library builds from views.
//!
//! | marker | passed as | the device sees | the host twin sees |
//! |---|---|---|---|
//! | [`InTable<T>`] | [`&BlockTable`](BlockTable) | `const T* const*` | [`BlockSlices<T>`] |
//! | [`InOutTable<T>`] | [`&mut BlockTableMut`](BlockTableMut) | `T* const*` | [`BlockSlicesMut<T>`] |
//!
//! The contents of a table decide what the kernel touches. So only the library makes tables, none changes, and a launch uses all that it names.
//!
//! # Invariants
//! 1. Every address of a table is that of a view that the table borrows, and a launch uses these views
//!    (`a_table_is_ordered_by_what_it_names`).
//! 2. All blocks of a table have the same length (`blocks_of_another_length_are_refused`).

use std::fmt;
use std::marker::PhantomData;

use super::integers::TableShape;
use super::signature::sealed::Sealed;
use super::signature::{Arg, ArgList, Param};
use crate::backend::ArgBlock;
use crate::error::refused::Here;
use crate::error::{ErrorDetail, Result};
use crate::memory::Element;
use crate::memory::allocation::ALIGNMENT;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::grouped::{Group, grouped};
use crate::memory::must_fit;
use crate::memory::view::{Readable, Span, View, ViewMut};
use crate::stream::Stream;
use crate::submit::wrong_device;
use gpu_await_protocol::hazard::Mode;

/// Marker: a table of blocks that the kernel reads.
#[derive(Debug)]
pub struct InTable<T>(PhantomData<fn() -> T>);

/// Marker: a table of blocks that the kernel may read and write. All of them must have been written.
#[derive(Debug)]
pub struct InOutTable<T>(PhantomData<fn() -> T>);

/// The addresses of blocks of device memory, for kernels that read them.
///
/// The blocks may belong to slabs or to any buffers, in any order, even repeatedly. They have the same length. For blocks of one slab, indices are
/// simpler and need no table: [`DeviceSlab::naming`](crate::DeviceSlab::naming).
///
/// # Ownership
/// The table borrows the blocks. A launch borrows the table for the call only; the device keeps everything it needs until the launch is complete.
///
/// # Ordering
/// A launch is ordered with other uses of the blocks that its table names, and of no others. Make a table before a
/// [replayed batch](crate::Stream::replay), not in its closure. In a replayed batch, blocks of a slab are ordered like the whole slab.
///
/// # Examples
/// ```
/// use gpu_await::{BlockSlices, BlockTable, Device, Grid, LaunchConfig, kernel};
///
/// kernel! {
///     /// `out[i] = the sum of element i of all blocks`.
///     unsafe fn sum_blocks(blocks: &[&[f32]], out: Out<[f32]>, count: u32 = blocks.blocks(), n: u32 = out.len())
///         where blocks.block_len() == out.len();
///     launch = LaunchConfig::for_elements(out.len());
///     host = twin;
/// }
/// fn twin(_: &Grid, blocks: BlockSlices<'_, f32>, out: &mut [f32], _count: u32, _n: u32) {
///     out.fill(0.0);
///     for block in blocks.iter() {
///         out.iter_mut().zip(block).for_each(|(out, x)| *out += x);
///     }
/// }
///
/// # futures::executor::block_on(async {
/// # let device = Device::host();
/// # let stream = device.stream()?;
/// let sum = sum_blocks::load(&device).await?;
/// let (slab, other) = (stream.slab::<f32>(10, 4).queued()?, stream.full(4, 2.0f32).queued()?);
/// let table = BlockTable::new(&stream, vec![slab.block(7)?, other.view(), other.view()])?;
/// let mut out = stream.empty::<f32>(4).queued()?;
/// sum.launch(&stream, &table, &mut out).queued()?;
/// assert_eq!(stream.download(&out).await?, [4.0; 4]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
pub struct BlockTable<'a, T>(Table<'a>, PhantomData<&'a T>);

/// The addresses of blocks of device memory, for kernels that read and write them; see [`BlockTable`].
pub struct BlockTableMut<'a, T>(Table<'a>, PhantomData<&'a mut T>);

struct Table<'a> {
    addresses: DeviceBuffer<u64>,
    groups: Vec<Group<'a>>,
    shape: TableShape,
}

impl<'a, T: Element> BlockTable<'a, T> {
    /// Uploads the addresses of the blocks.
    ///
    /// # Errors
    /// [`ErrorDetail::WrongLength`]: blocks of different lengths. [`ErrorDetail::WrongDevice`]: a block of another device than the stream's. Out of
    /// memory; a device that is lost or closed.
    ///
    /// # Source
    /// As [`Stream::upload_from`].
    #[track_caller]
    pub fn new(stream: &Stream, blocks: Vec<View<'a, T>>) -> Result<Self> {
        let lens = blocks.iter().map(View::len);
        let table = Table::new(stream, lens, blocks.iter().map(View::whole), Mode::Read);
        Ok(BlockTable(table.here()?, PhantomData))
    }
}

impl<'a, T: Element> BlockTableMut<'a, T> {
    /// Uploads the addresses of the blocks.
    ///
    /// # Errors
    /// As [`BlockTable::new`].
    ///
    /// # Source
    /// As [`Stream::upload_from`].
    #[track_caller]
    pub fn new(stream: &Stream, blocks: Vec<ViewMut<'a, T>>) -> Result<Self> {
        let lens = blocks.iter().map(ViewMut::len);
        let table = Table::new(stream, lens, blocks.iter().map(ViewMut::whole), Mode::ReadWrite);
        Ok(BlockTableMut(table.here()?, PhantomData))
    }
}

impl<T> BlockTable<'_, T> {
    /// Returns how many blocks it has, and their length.
    #[must_use]
    pub fn shape(&self) -> TableShape {
        self.0.shape
    }
}

impl<T> BlockTableMut<'_, T> {
    /// Returns how many blocks it has, and their length.
    #[must_use]
    pub fn shape(&self) -> TableShape {
        self.0.shape
    }
}

impl<'a> Table<'a> {
    #[track_caller]
    fn new(
        stream: &Stream,
        mut lens: impl Iterator<Item = usize>,
        spans: impl ExactSizeIterator<Item = Span<'a>>,
        mode: Mode,
    ) -> Result<Self> {
        let shape = TableShape { blocks: spans.len(), block_len: lens.next().unwrap_or(0) };
        if let Some(found) = lens.find(|len| *len != shape.block_len) {
            let (op, what, expected) = ("a table", "a block", shape.block_len);
            return Err(ErrorDetail::WrongLength { op, what, expected, found }.into());
        }
        let mut addresses = Vec::with_capacity(shape.blocks);
        let mut elsewhere = None;
        let engine = stream.engine();
        let spans = spans.inspect(|span| {
            addresses.push(span.address());
            if span.memory.engine.state.id != engine.state.id {
                elsewhere = Some(&span.memory.engine);
            }
        });
        let groups = grouped(spans, mode);
        if let Some(other) = elsewhere {
            return Err(wrong_device("a block of the table", engine, other));
        }
        Ok(Table { addresses: stream.upload_from(&addresses).queued()?, groups, shape })
    }

    fn push<'k>(&'k self, list: &mut ArgList<'k>) -> TableShape {
        let span = self.addresses.span();
        list.footprint.reads(&span);
        self.groups.iter().for_each(|group| list.footprint.touches_group(group));
        let numbers = [self.shape.blocks as u64, self.shape.block_len as u64, 0];
        list.block.push_memory_with(span.address(), span.size_bytes(), numbers);
        self.shape
    }
}

/// Blocks of a host device's memory, as a host twin reads them.
#[derive(Debug)]
pub struct BlockSlices<'a, T> {
    addresses: &'a [u64],
    block_len: usize,
    element: PhantomData<&'a [T]>,
}

/// Blocks of a host device's memory, as a host twin reads and writes them.
#[derive(Debug)]
pub struct BlockSlicesMut<'a, T> {
    addresses: &'a [u64],
    block_len: usize,
    element: PhantomData<&'a mut [T]>,
}

impl<'a, T> BlockSlices<'a, T> {
    /// Returns a block, if there is one with that number.
    #[must_use]
    pub fn get(&self, number: usize) -> Option<&'a [T]> {
        let start = start::<T>(self.addresses, number, self.block_len)?;
        // SAFETY: the launch names the block, which came from a view of that length: its elements are live, and only read for `'a`.
        Some(unsafe { std::slice::from_raw_parts(start, self.block_len) })
    }

    /// Returns all blocks, in order.
    pub fn iter(&self) -> impl Iterator<Item = &'a [T]> {
        (0..self.addresses.len()).filter_map(|number| self.get(number))
    }
}

impl<T> BlockSlicesMut<'_, T> {
    /// Returns a block, if there is one with that number.
    #[must_use]
    pub fn get(&self, number: usize) -> Option<&[T]> {
        let start = start::<T>(self.addresses, number, self.block_len)?;
        // SAFETY: as in `get_mut`; nothing writes the block while `self` is borrowed.
        Some(unsafe { std::slice::from_raw_parts(start, self.block_len) })
    }

    /// Returns a block for writing, if there is one with that number.
    pub fn get_mut(&mut self, number: usize) -> Option<&mut [T]> {
        let start = start::<T>(self.addresses, number, self.block_len)?;
        // SAFETY: the launch names the block, which came from an exclusive view of that length: its elements are live and exclusive; and one
        // block is borrowed at a time.
        Some(unsafe { std::slice::from_raw_parts_mut(start, self.block_len) })
    }

    /// The number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.addresses.len()
    }

    /// Whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }
}

/// The start of a block; dangling but aligned for one without elements.
fn start<T>(addresses: &[u64], number: usize, block_len: usize) -> Option<*mut T> {
    let address = *addresses.get(number)?;
    Some(if block_len == 0 { std::ptr::dangling_mut() } else { address as *mut T })
}

/// The addresses of a table, and the length of its blocks.
///
/// # Safety
/// Argument `index` of `args` is a table.
unsafe fn table(args: &ArgBlock, index: usize) -> (&[u64], usize) {
    let [blocks, block_len, _] = args.numbers(index).map(|number| number as usize);
    if blocks == 0 {
        return (&[], block_len);
    }
    // SAFETY: by this function's contract, that many addresses are in the buffer, which only the library wrote, and nothing writes it again.
    (unsafe { std::slice::from_raw_parts(args.address(index) as *const u64, blocks) }, block_len)
}

macro_rules! tables {
    ($($marker:ident $twin:ident)+) => {$(
        impl<T> Sealed for $marker<T> {}
        impl<T: 'static> Param for $marker<T> {
            type Shape = TableShape;
            type Twin<'a> = $twin<'a, T>;
            unsafe fn twin<'a>(args: &'a ArgBlock, index: usize) -> $twin<'a, T> {
                const { must_fit::<T>(ALIGNMENT) };
                // SAFETY: the argument was pushed as a table; the caller vouches for the memory that it names.
                let (addresses, block_len) = unsafe { table(args, index) };
                $twin { addresses, block_len, element: PhantomData }
            }
            fn describe(shape: &TableShape, name: &str) -> String {
                format!("{name}.blocks() = {}, {name}.block_len() = {}", shape.blocks, shape.block_len)
            }
        }
    )+};
}
tables! { InTable BlockSlices InOutTable BlockSlicesMut }

impl<'k, T: 'static> Arg<'k, InTable<T>> for &'k BlockTable<'_, T> {
    fn push(self, list: &mut ArgList<'k>) -> TableShape {
        self.0.push(list)
    }
}

impl<'k, T: 'static> Arg<'k, InOutTable<T>> for &'k mut BlockTableMut<'_, T> {
    fn push(self, list: &mut ArgList<'k>) -> TableShape {
        self.0.push(list)
    }
}

impl fmt::Debug for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TableShape { blocks, block_len } = self.shape;
        write!(f, "{blocks} blocks of {block_len} elements, {:?}", self.addresses)
    }
}

impl<T> fmt::Debug for BlockTable<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockTable({:?})", self.0)
    }
}

impl<T> fmt::Debug for BlockTableMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockTableMut({:?})", self.0)
    }
}
