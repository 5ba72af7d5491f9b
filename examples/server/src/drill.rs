//! Requests that end the process which computes them: for tests, and for operators who want to see what happens (`--isolate --drill`).
//!
//! | `POST /embed`, `tokens` | the process |
//! |---|---|
//! | `[4095, 4095, 0]` | aborts |
//! | `[4095, 4095, 1]` | panics in the request, and goes on |
//! | `[4095, 4095, 2]` | loses its device: a kernel writes where there is no memory |
//! | `[4095, 4095, 3]` | has a kernel that never ends |
//! | `[4095, 4095, 4]` | has one that takes a tenth of a second, and answers |
//!
//! Without `#![forbid(unsafe_code)]`, as `embed_mean.rs`: `unsafe fn` vouches for the PTX.

use gpu_await::{Device, Grid, LaunchConfig, Result, Stream, kernel};

kernel! {
    /// Ends after so many ns; after no time it writes where there is no memory.
    unsafe fn faulty(time: u64, out: &mut [f32]);
    launch = LaunchConfig::new(1, 1);
    ptx = PTX;
    host = twin;
}

const PTX: &str = "
.version 6.0
.target sm_60
.address_size 64
.visible .entry faulty(.param .u64 time, .param .u64 out)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [time];
    setp.eq.u64 %p1, %rd1, 0;
    @%p1 bra FAULT;
    mov.u64 %rd2, %globaltimer;
AGAIN:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra AGAIN;
    ret;
FAULT:
    mov.u64 %rd1, 8;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
";

fn twin(_: &Grid, time: u64, _: &mut [f32]) {
    assert!(time > 0, "an illegal address");
    std::thread::sleep(std::time::Duration::from_nanos(time));
}

pub(crate) struct Drill(faulty);

/// What a request does to its process.
#[derive(Clone, Copy)]
pub(crate) enum Fails {
    Aborts,
    Panics,
    Faults,
    NeverEnds,
    IsSlow,
}

impl Fails {
    /// What these tokens ask for, if it is that.
    pub(crate) fn of(tokens: &[u32]) -> Option<Fails> {
        match tokens {
            [4095, 4095, 0] => Some(Fails::Aborts),
            [4095, 4095, 1] => Some(Fails::Panics),
            [4095, 4095, 2] => Some(Fails::Faults),
            [4095, 4095, 3] => Some(Fails::NeverEnds),
            [4095, 4095, 4] => Some(Fails::IsSlow),
            _ => None,
        }
    }
}

impl Drill {
    pub(crate) async fn load(device: &Device) -> Result<Drill> {
        Ok(Drill(faulty::load(device).await?))
    }

    /// Does it.
    pub(crate) async fn run(&self, stream: &Stream, fails: Fails) -> Result<()> {
        let time = match fails {
            Fails::Aborts => std::process::abort(),
            Fails::Panics => panic!("a drill"),
            Fails::Faults => 0,
            Fails::NeverEnds => u64::MAX,
            Fails::IsSlow => 100_000_000,
        };
        let mut out = stream.zeros(1).queued()?;
        self.0.launch(stream, time, &mut out).await
    }
}
