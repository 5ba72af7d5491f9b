//! Frames from a socket through six kernels: three slots in flight, one await a frame.
//!
//! A client sends frames over a loopback UDP socket, at most three unanswered; the server copies
//! each up, runs six kernels, copies it down and sends it back. A frame is one `batch`: one future,
//! which brings the slot's buffers back. While one frame is on the device the next is received.
//!
//! Prints how many frames came back right, and how long one took on the average.

use std::{collections::VecDeque, time::Duration, time::Instant};

use gpu_await::{Device, DeviceBuffer, Op, PinnedBuffer, Stream, kernels};
use tokio::net::UdpSocket;

type Result<T = (), E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;
type Slot = ((PinnedBuffer<f32>, PinnedBuffer<f32>), (DeviceBuffer<f32>, DeviceBuffer<f32>));
type Stages = (kernels::scale, kernels::add, DeviceBuffer<f32>);

const N: usize = 256; // samples of a frame: 1 KiB
const FRAMES: usize = 2_000;
const SLOTS: usize = 3;

/// Puts a frame on the stream: three times `x = 2 x + 1`, which makes `8 x + 7`.
fn frame(s: &Stream, stages: &Stages, ((pin_in, pin_out), (mut a, mut b)): Slot) -> Op<Slot> {
    let (scale, add, one) = stages;
    s.batch(|q| {
        let pin_in = q.upload_into(pin_in, &mut a)?;
        for _ in 0..3 {
            scale.launch(q, 2.0, &mut a)?;
            add.launch(q, &a, one, &mut b)?;
            std::mem::swap(&mut a, &mut b);
        }
        let pin_out = q.download_into(&a, pin_out)?;
        Ok(((pin_in, pin_out), (a, b)))
    })
}

async fn serve(s: Stream, stages: Stages, mut free: Vec<Slot>, socket: UdpSocket) -> Result {
    let mut flying = VecDeque::<Op<Slot>>::new();
    let mut answered = 0;
    while answered < FRAMES {
        // `select!` also evaluates disabled branches: hence the `async` around the index.
        tokio::select! { biased;
            slot = async { (&mut flying[0]).await }, if !flying.is_empty() => {
                flying.pop_front();
                free.push(slot?);
                socket.send(bytemuck::cast_slice(&free[free.len() - 1].0.1)).await?;
                answered += 1;
            }
            ready = socket.readable(), if !free.is_empty() => {
                ready?;
                let Some(mut slot) = free.pop() else { continue };
                match socket.try_recv(bytemuck::cast_slice_mut(&mut slot.0.0)) {
                    Ok(_) => flying.push_back(frame(&s, &stages, slot)),
                    Err(_) => free.push(slot), // readiness may be false once
                }
            }
        }
    }
    Ok(())
}

async fn call(socket: UdpSocket) -> Result {
    let sample = |frame: usize, i: usize| (frame % 1000 + i) as f32;
    let mut reply = [0.0f32; N];
    for step in 0..FRAMES + SLOTS {
        if let Some(frame) = step.checked_sub(SLOTS) {
            socket.recv(bytemuck::cast_slice_mut(&mut reply)).await?;
            let right = (0..N).all(|i| reply[i] == 8.0 * sample(frame, i) + 7.0);
            assert!(right, "frame {frame} came back wrong");
        }
        if step < FRAMES {
            let frame: [f32; N] = std::array::from_fn(|i| sample(step, i));
            socket.send(bytemuck::cast_slice(&frame)).await?;
        }
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result {
    let device = Device::from_env()?;
    let s = device.stream()?;
    let (scale, add) = (kernels::scale::load(&device).await?, kernels::add::load(&device).await?);
    let stages = (scale, add, s.full(N, 1.0).queued()?);
    let buffers = || Ok::<_, gpu_await::Error>((s.empty(N).queued()?, s.empty(N).queued()?));
    let slot = |_| Ok(((s.pinned(N)?, s.pinned(N)?), buffers()?));
    let slots = (0..SLOTS).map(slot).collect::<Result<Vec<Slot>>>()?;
    let [server, client] =
        [UdpSocket::bind("127.0.0.1:0").await?, UdpSocket::bind("127.0.0.1:0").await?];
    server.connect(client.local_addr()?).await?;
    client.connect(server.local_addr()?).await?;

    let start = Instant::now();
    let both = async { tokio::try_join!(serve(s.clone(), stages, slots, server), call(client)) };
    tokio::time::timeout(Duration::from_secs(60), both).await??;
    let each = start.elapsed() / FRAMES as u32;
    println!("{device}: {FRAMES} frames back, all right, {each:.1?} each ({SLOTS} in flight)");
    Ok(())
}
