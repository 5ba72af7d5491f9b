//! [`Call`]: one collective of one rank as plain data, after every check and before any transport.
#![forbid(unsafe_code)]

use crate::element::{ElementType, Reduction};

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    AllReduce(Reduction),
    /// To that rank.
    Reduce(Reduction, usize),
    /// From that rank.
    Broadcast(usize),
    AllGather,
    ReduceScatter(Reduction),
    AllToAll,
    /// To that rank.
    Send(usize),
    /// From that rank.
    Receive(usize),
    Barrier,
}

/// A collective of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) verb: Verb,
    pub(crate) element: ElementType,
    /// In elements: of one rank's share, where ranks have shares.
    pub(crate) count: usize,
    /// Device addresses; 0 where there is nothing to read or to write.
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// What ranks must agree on, in its wire form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) verb: u8,
    pub(crate) element: u8,
    pub(crate) reduction: u8,
    pub(crate) root: u32,
    pub(crate) count: u64,
}

const NAMES: [&str; 9] = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send",
    "barrier",
    "recv",
];
/// The number of a receive in its own signature: its messages carry that of a send.
const RECEIVE: u8 = 8;
const NONE: u8 = u8::MAX;

impl Call {
    /// The bytes of `count` elements.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.element.size_bytes()
    }

    /// The bytes of a message of this call.
    pub(crate) fn message_bytes(&self) -> usize {
        if self.verb == Verb::Barrier { 0 } else { self.bytes() }
    }

    /// Whether rank `own`, which makes the call, gets data from rank `other` through it.
    pub(crate) fn gets_data(&self, own: usize, other: usize) -> bool {
        let is_sender = match self.verb {
            Verb::AllReduce(_) | Verb::AllGather | Verb::ReduceScatter(_) | Verb::AllToAll => true,
            Verb::Reduce(_, root) => own == root,
            Verb::Broadcast(root) => other == root,
            Verb::Receive(from) => other == from,
            Verb::Send(_) | Verb::Barrier => false,
        };
        is_sender && self.count > 0
    }

    /// What the rank has called, for a receive too, which is not what its peer calls.
    pub(crate) fn signature(&self) -> Head {
        match self.verb {
            Verb::Receive(_) => Head { verb: RECEIVE, ..self.head() },
            _ => self.head(),
        }
    }

    pub(crate) fn head(&self) -> Head {
        let (verb, reduction, root) = match self.verb {
            Verb::AllReduce(by) => (0, Some(by), 0),
            Verb::Reduce(by, root) => (1, Some(by), root),
            Verb::Broadcast(root) => (2, None, root),
            Verb::AllGather => (3, None, 0),
            Verb::ReduceScatter(by) => (4, Some(by), 0),
            Verb::AllToAll => (5, None, 0),
            Verb::Send(_) | Verb::Receive(_) => (6, None, 0),
            Verb::Barrier => (7, None, 0),
        };
        let position = |by| Reduction::ALL.iter().position(|known| *known == by);
        let reduction = reduction.and_then(position).map_or(NONE, |at| at as u8);
        let element = ElementType::ALL.iter().position(|known| *known == self.element);
        let element = element.map_or(NONE, |at| at as u8);
        Head { verb, element, reduction, root: root as u32, count: self.count as u64 }
    }
}

impl Head {
    pub(crate) const BYTES: usize = 16;

    pub(crate) fn to_bytes(self) -> [u8; Head::BYTES] {
        let mut bytes = [0; Head::BYTES];
        bytes[0] = self.verb;
        bytes[1] = self.element;
        bytes[2] = self.reduction;
        bytes[4..8].copy_from_slice(&self.root.to_le_bytes());
        bytes[8..].copy_from_slice(&self.count.to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: [u8; Head::BYTES]) -> Head {
        let [verb, element, reduction, _, r0, r1, r2, r3, count @ ..] = bytes;
        let (root, count) = (u32::from_le_bytes([r0, r1, r2, r3]), u64::from_le_bytes(count));
        Head { verb, element, reduction, root, count }
    }
}

/// `all_reduce(Sum) of 7 F32`
impl std::fmt::Display for Head {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(NAMES.get(usize::from(self.verb)).copied().unwrap_or("something unknown"))?;
        if let Some(by) = Reduction::ALL.get(usize::from(self.reduction)) {
            write!(f, "({by:?})")?;
        }
        if self.verb == 1 || self.verb == 2 {
            write!(f, " with root {}", self.root)?;
        }
        write!(f, " of {}", self.count)?;
        match ElementType::ALL.get(usize::from(self.element)) {
            Some(element) => write!(f, " {element:?}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_survive_the_wire() {
        let verb = Verb::Reduce(Reduction::Max, 70_000);
        let call = Call { verb, element: ElementType::Bf16, count: 1 << 40, from: 1, to: 2 };
        let head = call.head();
        assert_eq!(Head::from_bytes(head.to_bytes()), head);
        assert_eq!(head.to_string(), "reduce(Max) with root 70000 of 1099511627776 Bf16");
    }
}
