//! Grains against a list of who has which.

use gpu_await_protocol::grains::{GrainSet, Grains};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Take(u32),
    Give(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![(0_u32..140).prop_map(Step::Take), (0_usize..8).prop_map(Step::Give)];
    prop::collection::vec(step, 0..60)
}

/// As devices are divided: grains of one size, and what is left.
fn sizes() -> impl Strategy<Value = Vec<u32>> {
    let grains = prop_oneof![Just(2_u32), Just(4), Just(8)];
    (grains, 1_usize..20, 0_u32..16).prop_map(|(grain, count, rest)| {
        let mut sizes = vec![grain; count];
        sizes.extend((rest > 0).then_some(rest));
        sizes
    })
}

/// Runs the steps, and calls `check` behind each with the grains, the shares, and what was asked for and given last.
fn run(
    sizes: Vec<u32>,
    steps: Vec<Step>,
    check: impl Fn(
        &Grains,
        &[GrainSet],
        Option<(u32, u32, Option<GrainSet>)>,
    ) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut grains = Grains::new(sizes);
    let mut shares: Vec<GrainSet> = Vec::new();
    for step in steps {
        let mut last = None;
        match step {
            Step::Take(asked) => {
                let free = grains.free();
                let share = grains.take(asked);
                shares.extend(share);
                last = Some((asked, free, share));
            }
            Step::Give(at) if at < shares.len() => grains.give(shares.swap_remove(at)),
            Step::Give(_) => {}
        }
        check(&grains, &shares, last)?;
    }
    Ok(())
}

proptest! {
    #[test]
    fn shares_are_disjoint(sizes in sizes(), steps in steps()) {
        run(sizes, steps, |grains, shares, _| {
            let mut all: Vec<usize> = shares.iter().flat_map(|share| share.iter()).collect();
            let count = all.len();
            all.sort_unstable();
            all.dedup();
            prop_assert_eq!(all.len(), count);
            let taken: u32 = shares.iter().map(|share| grains.multiprocessors(*share)).sum();
            prop_assert_eq!(grains.free() + taken, grains.all());
            Ok(())
        })?;
    }

    #[test]
    fn a_share_is_large_enough_and_no_larger(sizes in sizes(), steps in steps()) {
        let known = sizes.clone();
        run(sizes, steps, |grains, _, last| {
            if let Some((asked, _, Some(share))) = last {
                let has = grains.multiprocessors(share);
                let smallest = share.iter().map(|at| known[at]).min().unwrap_or(0);
                prop_assert!(has >= asked && has - smallest < asked.max(1), "{asked}: {has}");
            }
            Ok(())
        })?;
    }

    #[test]
    fn what_is_free_can_be_taken(sizes in sizes(), steps in steps()) {
        run(sizes, steps, |_, _, last| {
            if let Some((asked, free, share)) = last {
                prop_assert_eq!(share.is_some(), free >= asked.max(1));
            }
            Ok(())
        })?;
    }

    /// One after the other and back, as services join and leave: the driver sees the same sets again.
    #[test]
    fn who_comes_back_gets_a_set_that_was_made_before(sizes in sizes(), asked in 1_u32..64) {
        let mut grains = Grains::new(sizes);
        let first = grains.take(asked);
        prop_assume!(first.is_some());
        let other = grains.take(1);
        grains.give(first.expect("assumed"));
        prop_assert_eq!(grains.take(asked), first);
        if let Some(other) = other {
            grains.give(other);
            prop_assert_eq!(grains.take(1), Some(other));
        }
    }
}
