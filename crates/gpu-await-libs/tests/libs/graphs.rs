//! Plans in graphs, and in replayed batches.

use gpu_await::{Device, DeviceKind, In, InOut, Region, Result, kernels, testing};
use gpu_await_libs::{Blas, Complex, Fft};

#[tokio::test]
async fn a_product_in_a_graph() -> Result<()> {
    const N: usize = 8;
    let device = testing::device();
    let Ok(blas) = Blas::load(&device).await else {
        assert_eq!(device.kind(), DeviceKind::Cuda, "the twin is always there");
        return Ok(());
    };
    let stream = device.stream()?;
    let gemm = blas.gemm::<f32>(N, N, N).plan().await?;
    let scale = kernels::scale::load(&device).await?;
    type Slots = (In<f32>, In<f32>, InOut<f32>, f32);
    let graph = device.graph::<Slots, _, _>((gemm, scale), |q, (gemm, scale), (x, w, mut y, a)| {
        gemm.launch(q, 1.0, &x, &w, 0.0, &mut y)?;
        scale.launch(q, a, &mut y)?;
        gemm.launch(q, a, &x, &w, 1.0, &mut y)
    });
    let w = stream.full(N * N, 0.5f32).queued()?;
    let mut y = stream.full(N * N, 0.0f32).queued()?;
    let other = device.stream()?;
    for round in 0..6 {
        // A producer on another stream.
        let x = other.full(N * N, round as f32).queued()?;
        let a = (round / 2) as f32;
        graph.launch(&stream, (&x, &w, &mut y, a)).queued()?;
        let expected = N as f32 * 0.5 * round as f32 * (2.0 * a);
        assert_eq!(stream.download(&y).await?, [expected; N * N], "round {round}");
    }
    Ok(())
}

#[tokio::test]
async fn a_transform_in_a_graph() -> Result<()> {
    let device = testing::device();
    let Ok(fft) = Fft::load(&device).await else {
        assert_eq!(device.kind(), DeviceKind::Cuda, "the twin is always there");
        return Ok(());
    };
    let fft = fft.complex::<f32>(&[16]).plan().await?;
    let stream = device.stream()?;
    let graph = device.graph::<(InOut<Complex<f32>>,), _, _>(fft, |q, fft, (mut x,)| {
        fft.forward_in_place(q, &mut x)?;
        fft.inverse_in_place(q, &mut x)
    });
    let mut x = stream.full(16, Complex::new(1.0f32, -1.0)).queued()?;
    for _ in 0..3 {
        graph.launch(&stream, (&mut x,)).await?;
    }
    let expected = Complex::new(4096.0, -4096.0);
    assert!(stream.download(&x).await?.iter().all(|x| (x - expected).norm() < 0.1));
    Ok(())
}

/// A plan that is made in a graph's closure is dropped there, and the graph goes on with what that had on the device. Lengths
/// with large prime factors need more of that.
#[tokio::test]
async fn a_plan_goes_before_its_graph() -> Result<()> {
    const N: usize = 4_099;
    let device = testing::device();
    let Ok(fft) = Fft::load(&device).await else {
        assert_eq!(device.kind(), DeviceKind::Cuda, "the twin is always there");
        return Ok(());
    };
    let stream = device.stream()?;
    let graph = device.graph::<(InOut<Complex<f32>>,), _, _>(fft, |q, fft, (mut x,)| {
        let plan = fft.complex::<f32>(&[N]).plan_blocking()?;
        plan.forward_in_place(q, &mut x)?;
        plan.inverse_in_place(q, &mut x)
    });
    let mut x = stream.full(N, Complex::new(1.0f32, -1.0)).queued()?;
    for round in 0..3 {
        graph.launch(&stream, (&mut x,)).await?;
        // What was destroyed is destroyed by then, and its memory somebody else's.
        drop(fft_of_another_length(&device, round).await?);
        let values = stream.download(&x).await?;
        let expected = Complex::new(N as f32, -(N as f32));
        assert!(values.iter().all(|x| (x - expected).norm() < 8.0), "round {round}: {}", values[0]);
        stream.fill(&mut x, Complex::new(1.0f32, -1.0)).queued()?;
    }
    Ok(())
}

async fn fft_of_another_length(device: &Device, round: usize) -> Result<impl Sized> {
    let fft = Fft::load(device).await?;
    fft.complex::<f32>(&[2_053 + 10 * round]).plan().await
}

/// What ends the list of a replayed batch is the program's line.
#[tokio::test]
async fn places_are_the_callers() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let [mut x, mut z] = [1.0f32, 1.0].map(|value| stream.full(4, value).queued().unwrap());
    scale.launch(&stream, 1.0, &mut x).await?;
    let plan = Fft::load(&device).await?.complex::<f32>(&[4]).plan().await?;
    let gemm = Blas::load(&device).await?.gemm::<f32>(2, 2, 2).plan().await?;
    let mut s = stream.zeros::<Complex<f32>>(4).queued()?;
    let mut t = stream.zeros::<Complex<f32>>(4).queued()?;
    let mut region = Region::new();
    let op = stream.replay(&mut region, |q| {
        scale.launch(q, 1.0, &mut x)?;
        plan.forward_in_place(q, &mut s)?;
        scale.launch(q, 1.0, &mut x)?;
        plan.forward(q, &s, &mut t)?;
        scale.launch(q, 1.0, &mut x)?;
        gemm.launch(q, 1.0, &x, &x, 0.0, &mut z)?;
        scale.launch(q, 1.0, &mut x)
    });
    op.await?;
    let last_run = region.last_run();
    let sites: Vec<_> = last_run.iter().filter_map(|list| list.ended_by.as_ref()).collect();
    assert_eq!(sites.len(), 3);
    for site in sites {
        assert!(site.at().file().ends_with("tests/libs/graphs.rs"), "{site}");
    }
    Ok(())
}
