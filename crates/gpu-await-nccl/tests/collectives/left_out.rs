//! Ranks that do not call when the others agree on who is left: all that go on are in one group, and the others hear that they are left out.

use std::time::Duration;

use gpu_await_nccl::{Error, Group};

use crate::support::{groups, within};

/// When a rank calls.
#[derive(Clone, Copy)]
enum Calls {
    At(Duration),
    /// When the others are through, and gone.
    Last,
}

type Ends = Vec<Result<Vec<usize>, Error>>;

/// Goes on without those who do not come.
async fn goes_on(mut group: Group, limit: Duration) -> Result<Vec<usize>, Error> {
    loop {
        match group.survivors_within(limit).await {
            Ok(rest) => return Ok(rest.original_ranks()),
            Err(Error::MissingRanks { missing, .. }) => group = group.without(&missing)?,
            Err(error) => return Err(error),
        }
    }
}

/// How each rank ends.
async fn ends(limit: Duration, calls: [Calls; 3]) -> Ends {
    let (mut tasks, mut last) = (Vec::new(), Vec::new());
    for (group, calls) in groups(3).await.into_iter().zip(calls) {
        match calls {
            Calls::At(at) => tasks.push(tokio::spawn(async move {
                tokio::time::sleep(at).await;
                goes_on(group, limit).await
            })),
            Calls::Last => last.push(group),
        }
    }
    let mut ends = within(futures::future::try_join_all(tasks)).await.expect("tasks");
    for group in last {
        ends.push(within(goes_on(group, limit)).await);
    }
    ends
}

/// Every rank that goes on is in a group of just those that go on.
fn is_one_group(ends: &Ends) -> bool {
    let go_on: Vec<_> = (0..ends.len()).filter(|rank| ends[*rank].is_ok()).collect();
    ends.iter().all(|end| match end {
        Ok(ranks) => *ranks == go_on,
        Err(error) => matches!(error, Error::Excluded { .. }),
    })
}

fn ms(ms: u64) -> Calls {
    Calls::At(Duration::from_millis(ms))
}

#[tokio::test]
async fn one_group_or_left_out() {
    for skew in [0, 5, 20, 100] {
        let calls = [ms(0), ms(skew), Calls::Last];
        let all = (0..30).map(|_| ends(Duration::from_millis(300), calls));
        for ends in futures::future::join_all(all).await {
            assert!(is_one_group(&ends), "{skew} ms: {ends:?}");
            assert!(matches!(ends[2], Err(Error::Excluded { .. })), "{skew} ms: {ends:?}");
        }
    }
}

/// A call that comes just as the limit of the others ends is in their group, or left out.
#[tokio::test]
async fn a_call_at_the_limit() {
    for _ in 0..10 {
        let all = (97..=103).flat_map(|late| {
            let some = [[ms(0), ms(0), ms(late)], [ms(0), ms(late), Calls::Last]];
            some.map(|calls| async move { (late, ends(Duration::from_millis(100), calls).await) })
        });
        for (late, ends) in futures::future::join_all(all).await {
            assert!(is_one_group(&ends), "{late} ms: {ends:?}");
        }
    }
}

/// It is no vote of a call that was given up: the others wait for the next one.
#[tokio::test]
async fn a_call_that_was_given_up() {
    let groups = groups(2).await;
    for _ in 0..20 {
        let mut given_up = Box::pin(groups[0].survivors());
        assert!(futures::poll!(given_up.as_mut()).is_pending());
        drop(given_up);
        let rests = groups.iter().map(Group::survivors);
        let rests = within(futures::future::try_join_all(rests)).await.expect("both");
        assert!(rests.iter().all(|rest| rest.world() == 2));
        let comms =
            rests.iter().map(|rest| async { rest.connect(&gpu_await::Device::host()).await });
        within(futures::future::try_join_all(comms)).await.expect("of one agreement");
    }
}
