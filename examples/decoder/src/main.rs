//! Programs around the decoder: token ids from prompts, a benchmark, a server. `--help` has the options.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use decoder::{Config, Decoder, Launches, Limits, Model, Request, Sampling, router};
use encoder::{Dtype, Failed, Place, Routes, listen, ms, up_to};
use gpu_await::half::f16;

/// A transformer decoder on a GPU
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    limits: Limits,
}

#[derive(Subcommand)]
enum Command {
    /// Continues the prompts of a file, a JSON array of arrays of ids; prints an array for each
    Generate {
        #[arg(long, value_name = "FILE")]
        ids: PathBuf,
        /// New tokens
        #[arg(long, default_value = "16")]
        new: usize,
        #[command(flatten)]
        sampling: Sampling,
    },
    /// Measures as many sequences at once as there are streams
    Bench {
        /// Tokens of a prompt
        #[arg(long, default_value = "128", value_parser = up_to(1 << 20))]
        prompt: usize,
        /// New tokens of each
        #[arg(long, default_value = "256", value_parser = up_to(1 << 20))]
        new: usize,
        #[arg(long, default_value = "5", value_parser = up_to(1 << 20))]
        rounds: usize,
        #[command(flatten)]
        sampling: Sampling,
    },
    /// Answers POST /generate with {"ids": [464, 3290], "new": 16}, a line for each token
    Serve {
        #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8080")]
        addr: SocketAddr,
        /// How long a client may take for a head, and for a body
        #[arg(long, value_name = "MS", default_value = "10000")]
        client_timeout: u64,
    },
}

fn main() -> ExitCode {
    let start = Instant::now();
    let Options { command, place, limits } = Options::parse();
    encoder::run("decoder", async {
        match place.dtype {
            Dtype::F16 => run::<f16>(command, &place, limits, start).await,
            Dtype::F32 => run::<f32>(command, &place, limits, start).await,
        }
    })
}

async fn run<T: Launches>(
    command: Command,
    place: &Place,
    limits: Limits,
    start: Instant,
) -> Result<(), Failed> {
    // `generate` asks once: compiling every graph first would take longer than it saves.
    let is_warmed = !matches!(command, Command::Generate { .. });
    let load = async || {
        let (device, folder) = place.open::<Config>().await?;
        let model = Model::<T>::load(&device, &folder).await?;
        tracing::info!("loaded {:.1} ms", ms(start.elapsed()));
        let all = limits.streams * model.config().n_positions.div_ceil(16);
        let blocks = if limits.blocks == 0 { all } else { limits.blocks };
        let limits = Limits { blocks, ..limits };
        let (decoder, worker) = Decoder::new(&model, limits, is_warmed).await?;
        Ok::<_, Failed>((model, decoder, tokio::spawn(worker)))
    };
    match command {
        Command::Generate { ids, new, sampling } => {
            let prompts: Vec<Vec<u32>> = serde_json::from_slice(&std::fs::read(ids)?)?;
            let (_, decoder, _) = load().await?;
            for ids in generate(&decoder, prompts, new, sampling).await?.0 {
                println!("{}", serde_json::to_string(&ids)?);
            }
            Ok(())
        }
        Command::Bench { prompt, new, rounds, sampling } => {
            let (model, decoder, _) = load().await?;
            let vocabulary = model.config().vocab_size;
            let id = |text: usize, at: usize| (text * 7919 + at * 104_729 + 11) % vocabulary;
            let prompt = |text| (0..prompt).map(|at| id(text, at) as u32).collect();
            let prompts: Vec<Vec<u32>> = (0..limits.streams).map(prompt).collect();
            bench(&decoder, &prompts, new, rounds, sampling).await
        }
        Command::Serve { addr, client_timeout } => {
            let serve = async |routes: &Routes| {
                let (_, decoder, worker) = load().await?;
                routes.set(router(decoder)).ok();
                Ok::<_, Failed>(worker.await??)
            };
            listen(addr, Duration::from_millis(client_timeout), serve).await
        }
    }
}

/// The new tokens of each prompt, and when each came, from the call on.
async fn generate(
    decoder: &Decoder,
    prompts: Vec<Vec<u32>>,
    new: usize,
    sampling: Sampling,
) -> Result<(Vec<Vec<u32>>, Vec<Vec<Duration>>), Failed> {
    let start = Instant::now();
    let mut clients = Vec::new();
    for (number, ids) in prompts.into_iter().enumerate() {
        let seed = sampling.seed.wrapping_add(number as u64);
        let request = Request { ids, new, stop: None, sampling: Sampling { seed, ..sampling } };
        let mut tokens = decoder.generate(request)?;
        clients.push(tokio::spawn(async move {
            let (mut ids, mut times) = (Vec::with_capacity(new), Vec::with_capacity(new));
            while let Some(token) = tokens.next().await {
                ids.push(token?);
                times.push(start.elapsed());
            }
            Ok::<_, Failed>((ids, times))
        }));
    }
    let mut all = (Vec::new(), Vec::new());
    for client in clients {
        let (ids, times) = client.await??;
        all.0.push(ids);
        all.1.push(times);
    }
    Ok(all)
}

/// Prints `name value unit` lines.
async fn bench(
    decoder: &Decoder,
    prompts: &[Vec<u32>],
    new: usize,
    rounds: usize,
    sampling: Sampling,
) -> Result<(), Failed> {
    // Clocks, caches, and on the host device graphs.
    for _ in 0..2 {
        generate(decoder, prompts.to_vec(), new, sampling).await?;
    }
    let (mut gaps, mut firsts) = (Vec::new(), Vec::new());
    let (mut rates, mut behind_first) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (_, times) = generate(decoder, prompts.to_vec(), new, sampling).await?;
        let first = times.iter().map(|times| times[0]).min().unwrap_or_default();
        let last = times.iter().map(|times| times[times.len() - 1]).max().unwrap_or_default();
        for times in &times {
            firsts.push(times[0]);
            gaps.extend(times.windows(2).map(|pair| pair[1] - pair[0]));
        }
        let tokens = prompts.len() * new;
        rates.push(tokens as f64 / last.as_secs_f64());
        behind_first.push((tokens - prompts.len()) as f64 / (last - first).as_secs_f64());
    }
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    println!("tokens {:.0} tokens/s", percentile(rates, 50));
    println!("behind_first {:.0} tokens/s", percentile(behind_first, 50));
    for (name, times) in [("between", gaps), ("first_token", firsts)] {
        let times: Vec<f64> = times.into_iter().map(us).collect();
        println!("{name}.p50 {:.1} us", percentile(times.clone(), 50));
        println!("{name}.p99 {:.1} us", percentile(times, 99));
    }
    Ok(())
}

fn percentile(mut of: Vec<f64>, percent: usize) -> f64 {
    of.sort_unstable_by(f64::total_cmp);
    if of.is_empty() { 0.0 } else { of[(of.len() - 1) * percent / 100] }
}
