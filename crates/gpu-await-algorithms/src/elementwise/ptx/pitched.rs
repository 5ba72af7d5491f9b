//! A kernel over rows with a pitch: each thread has a vector of a row, or an element where vectors do not fit.
//!
//! | parameter, after those of `ptx.rs` | what it is |
//! |---|---|
//! | `u64` | the number of columns |
//! | `u64` for each array, the output's last | the bytes from the beginning of one row to that of the next |
//!
//! The number of elements is that of all rows; "aligned" means that each row of each array begins at a vector, and that a row is a whole
//! number of vectors.
#![forbid(unsafe_code)]

use super::body::Body;
use super::text::{PtxText, Register, RegisterClass};
use super::{THREADS, Walked};

/// Writes the code, and adds its parameters. `arrays` are the inputs, then the output.
pub(super) fn rows(
    text: &mut PtxText,
    body: &Body<'_>,
    arrays: &[Walked],
    lanes: u32,
    (count, aligned): (Register, Register),
    parameters: &mut Vec<&'static str>,
) {
    let mut long = |text: &mut PtxText| {
        let register = text.parameter(RegisterClass::Long, "u64", parameters.len());
        parameters.push("u64");
        register
    };
    let columns = long(text);
    let pitches: Vec<Register> = arrays.iter().map(|_| long(text)).collect();
    let [thread, block] = [RegisterClass::Word, RegisterClass::Word].map(|class| text.fresh(class));
    text.line(format_args!("mov.u32 {thread}, %tid.x"));
    text.line(format_args!("mov.u32 {block}, %ctaid.x"));
    let before = text.op(RegisterClass::Long, "mul.wide.u32", &[&block, &THREADS]);
    let unit = text.op(RegisterClass::Long, "mad.wide.u32", &[&thread, &1, &before]);
    let single = text.op(RegisterClass::Predicate, "setp.eq.u32", &[&aligned, &0]);
    text.line(format_args!("@{single} bra SINGLES"));
    for lanes in [lanes, 1] {
        let shift = lanes.trailing_zeros();
        let units = text.op(RegisterClass::Long, "shr.u64", &[&count, &shift]);
        let behind = text.op(RegisterClass::Predicate, "setp.ge.u64", &[&unit, &units]);
        text.line(format_args!("@{behind} bra DONE"));
        let of_row = text.op(RegisterClass::Long, "shr.u64", &[&columns, &shift]);
        let row = text.op(RegisterClass::Long, "div.u64", &[&unit, &of_row]);
        let first = text.op(RegisterClass::Long, "mul.lo.u64", &[&row, &of_row]);
        let column = text.op(RegisterClass::Long, "sub.s64", &[&unit, &first]);
        let mut places = Vec::new();
        for (array, pitch) in arrays.iter().zip(&pitches) {
            let start = text.op(RegisterClass::Long, "mad.lo.u64", &[&row, pitch, &array.start]);
            let bytes = lanes * array.kind.bytes();
            places.push(text.op(RegisterClass::Long, "mad.lo.u64", &[&column, &bytes, &start]));
        }
        let [inputs @ .., output] = arrays else { unreachable!("a formula has an output") };
        let mut elements = Vec::new();
        for (array, place) in inputs.iter().zip(&places) {
            let words = text.load(array.kind, lanes, *place, 0, None);
            elements.push(text.unpack(array.kind, lanes, &words));
        }
        let mut results = Vec::new();
        for lane in 0..lanes as usize {
            let of_lane: Vec<Register> = elements.iter().map(|lanes| lanes[lane]).collect();
            results.extend(body.element(text, &of_lane, None, lane as u64, None));
        }
        let words = text.pack(output.kind, &results);
        text.store(output.kind, lanes, places[inputs.len()], 0, &words, None);
        if lanes > 1 {
            text.line(format_args!("ret"));
            text.label("SINGLES");
        } else {
            break;
        }
    }
    text.label("DONE");
}
