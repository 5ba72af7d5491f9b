//! Functions that have no PTX instruction: taken from the CUDA math library, compiled ahead of time (`math.cu`), and copied into a
//! kernel's text one by one.
//!
//! # Invariants
//! 1. A function is copied together with everything that it calls (`a_function_comes_with_what_it_calls`).
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use super::expression::{Binary, Expression, Step, Unary};

const LIBRARY: &str = include_str!("math.ptx");

/// Whether the formula calls one of them, whatever the element type; `%` does so only for floating point numbers.
pub(crate) fn is_needed(expression: &Expression) -> bool {
    expression.steps.iter().any(|step| {
        matches!(
            step,
            Step::Unary(Unary::Exp | Unary::Ln | Unary::Sin | Unary::Cos | Unary::Tanh, _)
                | Step::Binary(Binary::Powf | Binary::Rem, _, _)
        )
    })
}

/// The text of these functions, and of those that they call.
pub(crate) fn text(functions: &BTreeSet<&'static str>) -> String {
    if functions.is_empty() {
        return String::new();
    }
    let items = items(LIBRARY);
    let mut wanted: BTreeSet<&str> = items
        .iter()
        .map(|item| item.name)
        .filter(|name| name.strip_prefix("gpu_await_").is_some_and(|name| functions.contains(name)))
        .collect();
    loop {
        let named = |name: &str| {
            items.iter().any(|item| wanted.contains(item.name) && item.text.contains(name))
        };
        let more: Vec<&str> = items
            .iter()
            .map(|item| item.name)
            .filter(|name| !wanted.contains(name) && named(name))
            .collect();
        if more.is_empty() {
            break;
        }
        wanted.extend(more);
    }
    let texts = items.iter().filter(|item| wanted.contains(item.name)).map(|item| item.text);
    // A visible function would be compiled for calls from outside, and never be inlined.
    texts.map(|text| format!("{}\n", text.replace(".visible .func", ".func"))).collect()
}

/// A function, its declaration, or a table.
struct Item<'t> {
    name: &'t str,
    text: &'t str,
}

fn items(library: &str) -> Vec<Item<'_>> {
    let (mut items, mut start, mut depth, mut end) = (Vec::new(), None, 0_i32, 0);
    for line in library.split_inclusive('\n') {
        let begin = end;
        end += line.len();
        let code = line.split("//").next().unwrap_or_default().trim();
        let is_directive =
            [".version", ".target", ".address_size"].iter().any(|d| code.starts_with(d));
        if code.is_empty() || is_directive {
            continue;
        }
        let start_here = *start.get_or_insert(begin);
        depth += code.matches('{').count() as i32 - code.matches('}').count() as i32;
        if depth == 0 && code.ends_with([';', '}']) {
            let text = library[start_here..end].trim_end();
            items.push(Item { name: name(text), text });
            start = None;
        }
    }
    items
}

/// The name after a function's result, or before a table's length.
fn name(item: &str) -> &str {
    let is_table = item.starts_with(".global");
    let (_, behind) =
        if is_table { (item, item) } else { item.split_once(')').unwrap_or((item, item)) };
    let end = if is_table { '[' } else { '(' };
    let head = behind.split(end).next().unwrap_or_default();
    head.split_whitespace().next_back().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_comes_with_what_it_calls() {
        let names: BTreeSet<&str> = items(LIBRARY).iter().map(|item| item.name).collect();
        for name in ["exp", "ln", "sin", "cos", "tanh", "powf", "rem"] {
            for kind in ["f32", "f64"] {
                assert!(names.contains(&*format!("gpu_await_{name}_{kind}")), "{name}_{kind}");
            }
        }
        let sine = text(&BTreeSet::from(["sin_f64"]));
        for part in [
            "gpu_await_sin_f64",
            "__internal_trig_reduction_slowpathd",
            "__cudart_i2opi_d[",
            "__cudart_sin_cos_coeffs[",
        ] {
            assert!(sine.contains(part), "{part}");
        }
        for other in ["gpu_await_cos", "sin_f32", "accurate_pow", "i2opi_f", ".visible"] {
            assert!(!sine.contains(other), "{other}");
        }
        assert_eq!(text(&BTreeSet::new()), "");
    }
}
