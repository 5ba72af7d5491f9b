//! Programs around the decoder: token ids from prompts, a benchmark, a server. `--help` has the options.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand, ValueEnum};
use decoder::{Decoder, Folder, Launches, Limits, Model, Request, Sampling, router, serve, up_to};
use gpu_await::Device;
use gpu_await::half::f16;

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// A transformer decoder on a GPU
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    command: Command,
    /// The folder with config.json and model.safetensors
    #[arg(long, global = true, value_name = "DIR", default_value = ".")]
    model: PathBuf,
    /// What the model computes in; sums are in f32
    #[arg(long, global = true, value_enum, default_value = "f16")]
    dtype: Dtype,
    /// cuda:N, host, or auto
    #[arg(long, global = true, default_value = "auto")]
    device: String,
    /// Sequences at once
    #[arg(long, global = true, value_name = "N", default_value = "64", value_parser = up_to(4096))]
    streams: usize,
    /// Tokens of the prompts that start in one step
    #[arg(long, global = true, value_name = "N", default_value = "8192", value_parser = up_to(1 << 20))]
    prompt_tokens: usize,
    /// Blocks of the cache, of 16 tokens each; by default what all sequences can need
    #[arg(long, global = true, value_name = "N", value_parser = up_to(1 << 31))]
    blocks: Option<usize>,
    /// Requests that have not started; further ones get a 503
    #[arg(long, global = true, value_name = "N", default_value = "1024", value_parser = up_to(1 << 20))]
    waiting: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F16,
    F32,
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
        sample: Sample,
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
        sample: Sample,
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

#[derive(Args, Clone, Copy)]
struct Sample {
    /// Samples tokens instead of taking the most likely one
    #[arg(long)]
    sample: bool,
    #[arg(long, default_value = "1.0")]
    temperature: f32,
    #[arg(long, default_value = "50")]
    top_k: u32,
    #[arg(long, default_value = "0")]
    seed: u64,
}

impl Sample {
    fn sampling(&self, number: usize) -> Sampling {
        let seed = self.seed.wrapping_add(number as u64);
        let sampling = Sampling { temperature: self.temperature, top_k: self.top_k, seed };
        if self.sample { sampling } else { Sampling::default() }
    }
}

fn main() -> ExitCode {
    let start = Instant::now();
    let options = Options::parse();
    let ended = tokio::runtime::Runtime::new().map_err(Failed::from).and_then(|runtime| {
        runtime.block_on(async {
            match options.dtype {
                Dtype::F16 => run::<f16>(options, start).await,
                Dtype::F32 => run::<f32>(options, start).await,
            }
        })
    });
    ended.map_or_else(
        |error| {
            eprintln!("decoder: {error}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

async fn run<T: Launches>(options: Options, start: Instant) -> Result<(), Failed> {
    let folder = Arc::new(Folder::open(&options.model)?);
    let device = Device::builder().named(&options.device)?;
    eprintln!("device {device}");
    let model = Model::<T>::load(&device, &folder).await?;
    eprintln!("loaded {:.1} ms", ms(start.elapsed()));
    let positions = model.config().n_positions;
    let blocks = options.blocks.unwrap_or(options.streams * positions.div_ceil(16));
    let limits = Limits {
        streams: options.streams,
        prompt_tokens: options.prompt_tokens,
        blocks,
        waiting: options.waiting,
    };
    // `generate` asks once: compiling every graph first would take longer than it saves.
    let is_warmed = !matches!(options.command, Command::Generate { .. });
    let (decoder, worker) = Decoder::new(&model, limits, is_warmed).await?;
    let worker = tokio::spawn(worker);
    let asked = async {
        match options.command {
            Command::Generate { ids, new, sample } => {
                let prompts: Vec<Vec<u32>> = serde_json::from_slice(&std::fs::read(ids)?)?;
                for ids in generate(&decoder, prompts, new, sample).await?.0 {
                    println!("{}", serde_json::to_string(&ids)?);
                }
                Ok(())
            }
            Command::Bench { prompt, new, rounds, sample } => {
                let vocabulary = model.config().vocab_size;
                let id = |text: usize, at: usize| (text * 7919 + at * 104_729 + 11) % vocabulary;
                let prompt = |text| (0..prompt).map(|at| id(text, at) as u32).collect();
                let prompts: Vec<Vec<u32>> = (0..options.streams).map(prompt).collect();
                bench(&decoder, &prompts, new, rounds, sample).await
            }
            Command::Serve { addr, client_timeout } => {
                let listener = tokio::net::TcpListener::bind(addr).await;
                let listener = listener.map_err(|error| format!("{addr}: {error}"))?;
                println!("listening on http://{}", listener.local_addr()?);
                let patience = Duration::from_millis(client_timeout);
                Ok(serve(listener, router(decoder), patience).await?)
            }
        }
    };
    tokio::select! {
        asked = asked => asked,
        ended = worker => Ok(ended??),
    }
}

/// The new tokens of each prompt, and when each came, from the call on.
async fn generate(
    decoder: &Decoder,
    prompts: Vec<Vec<u32>>,
    new: usize,
    sample: Sample,
) -> Result<(Vec<Vec<u32>>, Vec<Vec<Duration>>), Failed> {
    let start = Instant::now();
    let mut clients = Vec::new();
    for (number, ids) in prompts.into_iter().enumerate() {
        let request = Request { ids, new, stop: None, sampling: sample.sampling(number) };
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
    sample: Sample,
) -> Result<(), Failed> {
    // Clocks, caches, and on the host device graphs.
    for _ in 0..2 {
        generate(decoder, prompts.to_vec(), new, sample).await?;
    }
    let (mut gaps, mut firsts) = (Vec::new(), Vec::new());
    let (mut rates, mut behind_first) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (_, times) = generate(decoder, prompts.to_vec(), new, sample).await?;
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

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
