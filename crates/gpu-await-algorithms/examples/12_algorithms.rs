//! Algorithms on streams: sequences, formulas, sums, sorts and selections, chained with one host wait.
//!
//! Prints what each part came to. Needs no GPU: `cargo run --example 12_algorithms`.

use gpu_await::{Device, Result};
use gpu_await_algorithms::{Algorithms, Compare, ReduceOp, Sequence, SequenceMut, transform};

const N: usize = 100_000;

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::from_env()?;
    let (a, b) = (device.stream()?, device.stream()?);

    // On each stream: 0, 1, 2, .., then by two or by three; one wait for both sums.
    let (mut x, mut y) = (a.empty::<i64>(N).queued()?, b.empty::<i64>(N).queued()?);
    a.sequence(0, 1, &mut x).queued()?;
    b.sequence(0, 1, &mut y).queued()?;
    a.transform_in_place(transform!(|x| 2 * x), (), &mut x).queued()?;
    b.transform_in_place(transform!(|x| 3 * x), (), &mut y).queued()?;
    let (twice, thrice) = tokio::try_join!(a.sum(&x), b.sum(&y))?;
    println!("by two {twice}, by three {thrice}");
    assert_eq!((twice * 3, twice), (thrice * 2, (N * (N - 1)) as i64));

    // A value of one stream is the step of another one's sequence.
    b.sequence(0, twice + 1, &mut y).queued()?;
    let last = b.max(&y).await?;
    println!("the last of a sequence with step {}: {last}", twice + 1);
    assert_eq!(last, (N as i64 - 1) * (twice + 1));

    // Pseudo-random numbers; those above a limit; sorted, and summed up to each: nobody on the host knows how many there are.
    let scrambled = transform!(|x| (x * 2_654_435_761) & 0xffff);
    a.transform_in_place(scrambled, (), &mut x).queued()?;
    let mut kept = a.zeros::<i64>(N).queued()?;
    let mut count = a.empty::<u64>(1).queued()?;
    a.copy_if_into(&x, Compare::Greater(60_000), &mut kept, &mut count).queued()?;
    a.sort_descending(&mut kept.up_to_mut(&count)?).queued()?;
    let mut sums = a.zeros::<i64>(N).queued()?;
    a.inclusive_scan(&kept.up_to(&count)?, ReduceOp::Sum, &mut sums).queued()?;
    let (number, total, most) =
        tokio::try_join!(a.download(&count), a.sum(&kept.up_to(&count)?), a.max(&sums))?;
    println!("{} are above 60,000, together {total}", number[0]);
    assert_eq!(total, most);

    // The smallest three, with where they were.
    let mut places = a.empty::<u64>(N).queued()?;
    a.sequence(0, 1, &mut places).queued()?;
    a.sort_by_key(&mut x, &mut places).queued()?;
    let (least, at) =
        tokio::try_join!(a.download(&x.slice(..3)?), a.download(&places.slice(..3)?))?;
    println!("the least: {:?} at {:?}", &least[..], &at[..]);
    Ok(())
}
