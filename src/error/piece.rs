//! Problems of one piece among many.
#![forbid(unsafe_code)]

/// Why a piece cannot be copied with the others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are described by each variant")]
pub enum PieceProblem {
    /// Source and destination have different lengths (in elements).
    #[error("its source has {source_len} elements, its destination {destination_len}")]
    Lengths { source_len: usize, destination_len: usize },
    /// It shares bytes with piece `other`, and one of the two writes them. If it overlaps its own source, `other` is the piece itself.
    #[error(
        "it shares {bytes} bytes with piece {other}, and one of them is written: pieces are copied in no order, so copy these two in two \
         operations"
    )]
    Overlap { other: usize, bytes: u64 },
}
