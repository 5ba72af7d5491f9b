//! What a launch passes to its kernel: argument words, to which the driver gets pointers, and which the kernel's [twin](super::twin)
//! reads.
#![forbid(unsafe_code)]

use bytemuck::{Pod, Zeroable};
use smallvec::SmallVec;

/// The maximum number of arguments of a kernel, of this crate and its siblings.
const MOST_ARGS: usize = 16;

/// Pointers to a kernel's arguments, in order.
pub(crate) type ArgPointers = [*mut std::ffi::c_void; MOST_ARGS];

/// The pointers of a kernel without arguments.
pub(crate) const NO_ARGS: ArgPointers = [std::ptr::null_mut(); MOST_ARGS];

/// The arguments of one launch: values in 8-byte words, one slot an argument.
///
/// The driver wants an array of pointers to the values; the twin reads the slots.
#[derive(Debug, Default, PartialEq, Eq)]
#[doc(hidden)]
pub struct ArgBlock {
    words: SmallVec<[u64; 32]>,
    slots: SmallVec<[ArgSlot; 16]>,
}

/// The slot of an argument: the index of its first word, and whether that is an address, with its byte count in the word after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct ArgSlot(u32);

impl ArgSlot {
    const MEMORY: u32 = 1 << 31;

    #[inline]
    fn word(self) -> usize {
        (self.0 & !Self::MEMORY) as usize
    }

    /// For an address: the bytes that the kernel may touch there; 0 for a value.
    #[inline]
    fn memory_bytes(self, words: &[u64]) -> u64 {
        if self.0 & Self::MEMORY == 0 { 0 } else { words[self.word() + 1] }
    }
}

impl Clone for ArgBlock {
    fn clone(&self) -> Self {
        self.arguments().to_block()
    }
}

impl ArgBlock {
    /// Adds a value of any plain type, up to its size rounded to words.
    // Inlined: where the length is known this is one store.
    #[inline(always)]
    pub fn push_value(&mut self, bytes: &[u8]) {
        let word = self.words.len() as u32;
        if bytes.len() <= 8 {
            self.push_word(bytes);
        } else {
            bytes.chunks(8).for_each(|chunk| self.push_word(chunk));
        }
        self.slots.push(ArgSlot(word));
    }

    #[inline(always)]
    fn push_word(&mut self, bytes: &[u8]) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        self.words.push(u64::from_ne_bytes(padded));
    }

    /// Adds an address of `memory_bytes` bytes.
    #[inline(always)]
    pub fn push_memory(&mut self, address: u64, memory_bytes: u64) {
        let word = self.words.len() as u32;
        self.words.push(address);
        self.words.push(memory_bytes);
        self.slots.push(ArgSlot(word | ArgSlot::MEMORY));
    }

    /// Adds an address as [`push_memory`](Self::push_memory) does, with numbers for the twin after it. The driver reads
    /// only the kernel's parameter size, and so the address alone.
    pub(crate) fn push_memory_with(&mut self, address: u64, memory_bytes: u64, numbers: [u64; 3]) {
        self.push_memory(address, memory_bytes);
        self.words.extend(numbers);
    }

    /// The numbers behind the address in slot `index`.
    pub(crate) fn numbers(&self, index: usize) -> [u64; 3] {
        let first = self.slots[index].word() + 2;
        [self.words[first], self.words[first + 1], self.words[first + 2]]
    }

    /// The first `len` bytes of the value in slot `index`.
    #[must_use]
    pub fn value(&self, index: usize, len: usize) -> &[u8] {
        let word = self.slots[index].word();
        &bytemuck::cast_slice(&self.words[word..])[..len]
    }

    /// The address in slot `index`.
    #[must_use]
    pub fn address(&self, index: usize) -> u64 {
        self.words[self.slots[index].word()]
    }

    /// The bytes that the kernel may touch at the address in slot `index`.
    #[must_use]
    pub fn memory_bytes(&self, index: usize) -> u64 {
        self.slots[index].memory_bytes(&self.words)
    }

    /// All arguments.
    #[inline]
    pub(crate) fn arguments(&self) -> Arguments<'_> {
        Arguments { words: &self.words, slots: &self.slots }
    }
}

/// The arguments of one launch, wherever they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arguments<'a> {
    pub(crate) words: &'a [u64],
    pub(crate) slots: &'a [ArgSlot],
}

impl Arguments<'_> {
    /// The addresses among them, each with the bytes that the kernel may touch there.
    pub(crate) fn memory(&self) -> impl Iterator<Item = (u64, u64)> {
        let memory = self.slots.iter().map(|slot| (slot, slot.memory_bytes(self.words)));
        let memory = memory.filter(|(_, bytes)| *bytes > 0);
        memory.map(|(slot, bytes)| (self.words[slot.word()], bytes))
    }

    /// Pointers to the values, in order, as `cuLaunchKernel` wants them; valid while the words are
    /// neither changed nor moved.
    #[inline]
    pub(crate) fn pointers(&self) -> ArgPointers {
        let mut pointers = NO_ARGS;
        self.point(&mut pointers);
        pointers
    }

    /// Fills in as many [pointers](Self::pointers) as there are arguments.
    #[inline]
    pub(crate) fn point(&self, pointers: &mut ArgPointers) {
        for (pointer, slot) in pointers[..self.slots.len()].iter_mut().zip(self.slots) {
            let word: *const u64 = &self.words[slot.word()];
            *pointer = word.cast_mut().cast();
        }
    }

    /// Copies memory: the derived `Clone` of a block copies the words one by one.
    pub(crate) fn to_block(self) -> ArgBlock {
        let (words, slots) = (SmallVec::from_slice(self.words), SmallVec::from_slice(self.slots));
        ArgBlock { words, slots }
    }
}
