//! [`Frame`]: what processes of a group write to one another, and its bytes.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | the channel's number |
//! | 1 | the [`Kind`] |
//! | 4, 4 | the sender's and the receiver's ranks in the channel |
//! | 8 | the length of the rest, which has a bound for each kind |
#![forbid(unsafe_code)]

use std::io::Read;
use std::net::TcpStream;
use std::sync::Arc;

use crate::call::Head;
use crate::element::ElementType;
use crate::exchange::{Message, Purpose};
use crate::rendezvous::MOST_RANKS;
use crate::unique_id::UniqueId;

pub(super) const HEADER: usize = 8 + 1 + 4 + 4 + 8;

/// The longest text, cause or hello.
const MOST_SMALL: u64 = 1 << 14;
/// The most elements that a message may have, in bytes.
const MOST_DATA: u64 = 1 << 40;
/// What is reserved for a message before any of it has come.
const FIRST: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Data,
    Signature,
    Waits,
    Taken,
    Hello,
    Ready,
    GaveUp,
    Lost,
    Leave,
    Agree,
    Goodbye,
    Noted,
}

impl Kind {
    const ALL: [Kind; 12] = [
        Kind::Data,
        Kind::Signature,
        Kind::Waits,
        Kind::Taken,
        Kind::Hello,
        Kind::Ready,
        Kind::GaveUp,
        Kind::Lost,
        Kind::Leave,
        Kind::Agree,
        Kind::Goodbye,
        Kind::Noted,
    ];

    /// The greatest length of the rest of a frame.
    fn most(self) -> u64 {
        match self {
            Kind::Data => MOST_DATA,
            Kind::Agree => 17 + 8 * MOST_RANKS as u64,
            _ => MOST_SMALL,
        }
    }
}

/// What a frame is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Label {
    pub(super) number: u64,
    pub(super) kind: Kind,
    pub(super) from: usize,
    pub(super) to: usize,
}

impl Label {
    /// A frame of a process rather than of a rank.
    pub(super) fn of(number: u64, kind: Kind) -> Label {
        Label { number, kind, from: 0, to: 0 }
    }

    pub(super) fn to_bytes(self, rest: usize) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&self.number.to_le_bytes());
        header[8] = self.kind as u8;
        header[9..13].copy_from_slice(&(self.from as u32).to_le_bytes());
        header[13..17].copy_from_slice(&(self.to as u32).to_le_bytes());
        header[17..].copy_from_slice(&(rest as u64).to_le_bytes());
        header
    }
}

/// What a process says about itself when the ranks of a channel come together.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    /// As the channel numbers them; not sent, since the others know them.
    pub(crate) ranks: Vec<usize>,
    pub(crate) is_gpu: bool,
    /// NCCL can shrink the communicator here.
    pub(crate) shrink: bool,
    /// NCCL's id, from the process with rank 0.
    pub(crate) id: UniqueId,
}

/// Which processes go on, as one of them sees it; ranks of the mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Proposal {
    pub(super) generation: u64,
    pub(super) step: Step,
    pub(super) left: Vec<usize>,
    pub(super) gone: Vec<usize>,
    /// The rank that called first, as far as this process knows.
    pub(super) caller: usize,
}

/// How far the process that proposes is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd)]
pub(super) enum Step {
    #[default]
    Called,
    /// All remaining processes propose the same.
    Heard,
    /// All remaining processes have heard that.
    Agreed,
}

/// What a process sends.
pub(super) enum Frame {
    Message(Message),
    Taken(u64),
    Hello(Arrival),
    Ready,
    GaveUp,
    /// A cause, as bytes.
    Lost(Vec<u8>),
    /// How many collective calls the rank has made.
    Leave(u64),
    Agree(Proposal),
    Goodbye,
    /// The process knows that it is left out, and no longer agrees.
    Noted,
    /// Data for a channel that does not take it.
    Unwanted,
}

/// Why no frame was read.
pub(super) enum Unread {
    Ended,
    /// It is not a frame; says what is wrong with it.
    Junk(String),
}

impl From<std::io::Error> for Unread {
    fn from(_: std::io::Error) -> Self {
        Unread::Ended
    }
}

fn junk<T>(reason: impl Into<String>) -> Result<T, Unread> {
    Err(Unread::Junk(reason.into()))
}

/// Reads a frame; data only for a channel that takes it.
pub(super) fn read(
    stream: &mut TcpStream,
    takes: impl Fn(u64) -> bool,
) -> Result<(Label, Frame), Unread> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let [first, second] = [&header[9..13], &header[13..17]].map(|bytes| number(bytes) as usize);
    let Some(kind) = Kind::ALL.get(usize::from(header[8])).copied() else {
        return junk(format!("a frame of the unknown kind {}", header[8]));
    };
    let label = Label { number: number(&header[..8]), kind, from: first, to: second };
    let bytes = number(&header[17..]);
    if bytes > kind.most() {
        return junk(format!("a {kind:?} frame of {bytes} bytes; {} are the most", kind.most()));
    }
    if kind == Kind::Data {
        return Ok((label, read_data(stream, bytes, takes(label.number))?));
    }
    let mut rest = vec![0; bytes as usize];
    stream.read_exact(&mut rest)?;
    match small(kind, &rest) {
        Some(frame) => Ok((label, frame)),
        None => junk(format!("a {kind:?} frame of {bytes} bytes that says nothing")),
    }
}

/// Reads as many elements as their head says.
fn read_data(stream: &mut TcpStream, bytes: u64, is_wanted: bool) -> Result<Frame, Unread> {
    let Some(expected) = bytes.checked_sub(Head::BYTES as u64) else {
        return junk(format!("a message of {bytes} bytes"));
    };
    let mut head = [0; Head::BYTES];
    stream.read_exact(&mut head)?;
    let head = Head::from_bytes(head);
    let size = ElementType::ALL.get(usize::from(head.element)).map(|element| element.size_bytes());
    let announced = size.and_then(|size| head.count.checked_mul(size as u64));
    // A barrier has none.
    if expected > 0 && announced != Some(expected) {
        return junk(format!("a message for {head} with {expected} bytes of elements"));
    }
    let mut rest = stream.take(expected);
    if !is_wanted {
        return match std::io::copy(&mut rest, &mut std::io::sink())? == expected {
            true => Ok(Frame::Unwanted),
            false => Err(Unread::Ended),
        };
    }
    let mut data = Vec::with_capacity(FIRST.min(expected as usize));
    if rest.read_to_end(&mut data)? as u64 != expected {
        return Err(Unread::Ended);
    }
    Ok(Frame::Message(Message { purpose: Purpose::Data, head, data: data.into() }))
}

fn small(kind: Kind, rest: &[u8]) -> Option<Frame> {
    let message = |purpose, head: &[u8]| {
        let head = Head::from_bytes(head.try_into().ok()?);
        Some(Frame::Message(Message { purpose, head, data: Arc::new([]) }))
    };
    match kind {
        Kind::Data => None,
        Kind::Signature => message(Purpose::Signature, rest),
        Kind::Waits => {
            let (number, head) = rest.split_first_chunk()?;
            message(Purpose::Waits(u64::from_le_bytes(*number)), head)
        }
        Kind::Taken => Some(Frame::Taken(u64::from_le_bytes(rest.try_into().ok()?))),
        Kind::Hello => {
            let ([is_gpu, shrink], id) = rest.split_first_chunk()?;
            let id = UniqueId::from_bytes(id.try_into().ok()?);
            if *is_gpu > 1 || *shrink > 1 {
                return None;
            }
            let (ranks, is_gpu, shrink) = (Vec::new(), *is_gpu == 1, *shrink == 1);
            Some(Frame::Hello(Arrival { ranks, is_gpu, shrink, id }))
        }
        Kind::Ready => Some(Frame::Ready),
        Kind::GaveUp => Some(Frame::GaveUp),
        Kind::Lost => Some(Frame::Lost(rest.to_vec())),
        Kind::Leave => Some(Frame::Leave(u64::from_le_bytes(rest.try_into().ok()?))),
        Kind::Agree => Some(Frame::Agree(Proposal::from_bytes(rest)?)),
        Kind::Goodbye => Some(Frame::Goodbye),
        Kind::Noted => Some(Frame::Noted),
    }
}

impl Arrival {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        [&[u8::from(self.is_gpu), u8::from(self.shrink)][..], &self.id.to_bytes()].concat()
    }
}

impl Proposal {
    /// Whether it is the same proposal, and at least at that step.
    pub(super) fn is(&self, other: &Proposal, step: Step) -> bool {
        (self.generation, &self.left) == (other.generation, &other.left) && self.step >= step
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.generation.to_le_bytes().to_vec();
        bytes.push(self.step as u8);
        bytes.extend((self.caller as u32).to_le_bytes());
        for ranks in [&self.left, &self.gone] {
            bytes.extend((ranks.len() as u32).to_le_bytes());
            ranks.iter().for_each(|rank| bytes.extend((*rank as u32).to_le_bytes()));
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Proposal> {
        let (generation, bytes) = bytes.split_first_chunk()?;
        let (step, bytes) = bytes.split_first()?;
        let step = *[Step::Called, Step::Heard, Step::Agreed].get(usize::from(*step))?;
        let (caller, bytes) = bytes.split_first_chunk()?;
        let (left, bytes) = ranks(bytes)?;
        let (gone, bytes) = ranks(bytes)?;
        let generation = u64::from_le_bytes(*generation);
        let caller = u32::from_le_bytes(*caller) as usize;
        bytes.is_empty().then_some(Proposal { generation, step, left, gone, caller })
    }
}

fn ranks(bytes: &[u8]) -> Option<(Vec<usize>, &[u8])> {
    let (count, bytes) = bytes.split_first_chunk()?;
    let count = 4 * u64::from(u32::from_le_bytes(*count));
    let (ranks, bytes) = bytes.split_at_checked(usize::try_from(count).ok()?)?;
    Some((ranks.chunks_exact(4).map(|rank| number(rank) as usize).collect(), bytes))
}

/// A number of at most 8 bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}
