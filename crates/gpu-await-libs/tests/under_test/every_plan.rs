//! Every method of the libraries that calls one, called where a call that waits would wait for itself.

use gpu_await::{Device, DeviceKind, Result};
use gpu_await_libs::{Blas, Complex, ComplexFft, Fft, Gemm, RealFft};

use super::inside::{Inside, Methods, World, at_once};

/// Plans of a host device, loaded before the host function runs. On a GPU, loading them would wait for the gates of whatever tests run
/// beside this one.
#[derive(Default)]
pub(crate) struct Plans {
    blas: Option<(Blas, Gemm<f32>, Gemm<f32>)>,
    fft: Option<(Fft, ComplexFft<f32>, RealFft<f32>)>,
}

impl Plans {
    pub(crate) fn new(device: &Device) -> Result<Plans> {
        if device.kind() != DeviceKind::Host {
            return Ok(Plans::default());
        }
        let (blas, fft) = (Blas::load_blocking(device)?, Fft::load_blocking(device)?);
        let product = || blas.gemm::<f32>(4, 4, 4);
        let (plain, biased) = (product().plan_blocking()?, product().bias().plan_blocking()?);
        let (complex, real) = (fft.complex(&[4]).plan_blocking()?, fft.real(&[6]).plan_blocking()?);
        Ok(Plans { blas: Some((blas, plain, biased)), fft: Some((fft, complex, real)) })
    }
}

/// Calls everything there.
pub(crate) fn run(device: &Device, inside: Inside) -> Result<()> {
    let plans = Plans::new(device)?;
    World::new(device)?.run(inside, |world| every_plan(world, &plans))
}

/// What it takes is made here, outside of the host function; the full stream waits for that from here on.
pub(crate) fn every_plan(world: &World, plans: &Plans) -> Result<Methods> {
    let World { device, host, full, .. } = world;
    let mut list = Methods::called_in(file!());
    full.wait(host).queued()?;
    macro_rules! each {
        ($how:ident: $($name:literal, $object:ident => |$on:ident| $call:expr;)+) => {$({
            let $on = $object.clone();
            list.$how($name, move || $call);
        })+};
    }
    each! { refuses:
        "Blas::load", device => |d| at_once(Blas::load(&d)).map(drop);
        "Blas::load_blocking", device => |d| Blas::load_blocking(&d).map(drop);
        "Fft::load", device => |d| at_once(Fft::load(&d)).map(drop);
        "Fft::load_blocking", device => |d| Fft::load_blocking(&d).map(drop);
    }
    if let Some((fft, complex, real)) = plans.fft.clone() {
        each! { refuses:
            "FftBuilder::plan", fft => |f| at_once(f.complex::<f32>(&[4]).plan());
            "FftBuilder::plan_blocking", fft => |f| f.complex::<f32>(&[4]).plan_blocking();
        }
        let one = Complex::new(1.0f32, 0.0);
        let args = || -> Result<_> {
            let (x, y) = (full.full(4, one).queued()?, full.full(4, one).queued()?);
            Ok((full.clone(), x, y, full.full(6, 1.0f32).queued()?))
        };
        let (plan, (on, x, mut y, _)) = (complex.clone(), args()?);
        list.refuses("ComplexFft::forward", move || plan.forward(&on, &x, &mut y).queued());
        let (plan, (on, x, mut y, _)) = (complex.clone(), args()?);
        list.refuses("ComplexFft::inverse", move || plan.inverse(&on, &x, &mut y).queued());
        let (plan, (on, _, mut y, _)) = (complex.clone(), args()?);
        list.refuses("ComplexFft::forward_in_place", move || {
            plan.forward_in_place(&on, &mut y).queued()
        });
        let (plan, (on, _, mut y, _)) = (complex, args()?);
        list.refuses("ComplexFft::inverse_in_place", move || {
            plan.inverse_in_place(&on, &mut y).queued()
        });
        let (plan, (on, mut x, _, s)) = (real.clone(), args()?);
        list.refuses("RealFft::forward", move || plan.forward(&on, &s, &mut x).queued());
        let (plan, (on, mut x, _, mut s)) = (real, args()?);
        list.refuses("RealFft::inverse", move || plan.inverse(&on, &mut x, &mut s).queued());
    }
    if let Some((blas, gemm, biased)) = plans.blas.clone() {
        each! { refuses:
            "GemmBuilder::plan", blas => |b| at_once(b.gemm::<f32>(1, 1, 1).plan());
            "GemmBuilder::plan_blocking", blas => |b| b.gemm::<f32>(1, 1, 1).plan_blocking();
        }
        let (a, mut c, on) =
            (full.full(16, 1.0f32).queued()?, full.zeros(16).queued()?, full.clone());
        list.refuses("Gemm::launch", move || gemm.launch(&on, 1.0, &a, &a, 0.0, &mut c).queued());
        let (a, mut c, on) =
            (full.full(16, 1.0f32).queued()?, full.zeros(16).queued()?, full.clone());
        list.refuses("Gemm::launch_with_bias", move || {
            let bias = a.slice(..4)?;
            biased.launch_with_bias(&on, 1.0, &a, &a, &bias, 0.0, &mut c).queued()
        });
    }
    Ok(list)
}
