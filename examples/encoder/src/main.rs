//! Programs around the encoder: a server, its clients, a file of embeddings, a benchmark. `--help` has the options.

#![forbid(unsafe_code)]

mod clients;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use encoder::{
    Config, Dtype, Failed, Lane, Launches, MOST_TEXTS, Model, NOT_FINITE, Place, Process, Service,
    Serving, check, is_embedding, listen, ms, router, up_to,
};
use gpu_await::half::f16;

/// A transformer encoder on a GPU
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    place: Place,
    /// Tokens of a batch
    #[arg(long, global = true, value_name = "N", default_value = "8192", value_parser = up_to(1 << 20))]
    max_tokens: usize,
}

#[derive(Subcommand)]
enum Command {
    /// Answers POST /embed with {"ids": [[101, 102], ..]}
    Serve {
        #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8080")]
        addr: SocketAddr,
        #[command(flatten)]
        serving: Serving,
    },
    /// Embeds the texts of a file, a JSON array of arrays of ids
    Embed {
        #[arg(long, value_name = "FILE")]
        ids: PathBuf,
        /// For the embeddings: raw f32, a row for each text
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// For the hidden states: raw f32, for each text and each layer a row for each token, the embedding's layer first
        #[arg(long, value_name = "FILE")]
        layers: Option<PathBuf>,
    },
    /// Asks a server, whose answers it compares with its own, for as many requests a second as it can take
    Load(clients::Traffic),
    /// Measures one batch after the other, and two at a time
    Bench {
        #[arg(long, default_value = "1", value_parser = up_to(4096))]
        batch: usize,
        #[arg(long, default_value = "128", value_parser = up_to(1 << 20))]
        tokens: usize,
        #[arg(long, default_value = "200", value_parser = up_to(1 << 20))]
        rounds: usize,
    },
}

fn main() -> ExitCode {
    gpu_await_worker::init::<Process>();
    let start = Instant::now();
    let Options { command, place, max_tokens } = Options::parse();
    encoder::run("encoder", async {
        match place.dtype {
            Dtype::F16 => run::<f16>(command, &place, max_tokens, start).await,
            Dtype::F32 => run::<f32>(command, &place, max_tokens, start).await,
        }
    })
}

async fn run<T: Launches>(
    command: Command,
    place: &Place,
    max_tokens: usize,
    start: Instant,
) -> Result<(), Failed> {
    let load = async || {
        let (device, folder) = place.open().await?;
        let model = Model::<T>::load(&device, &folder).await?;
        tracing::info!("loaded {:.1} ms", ms(start.elapsed()));
        Ok::<_, Failed>(model)
    };
    match command {
        Command::Serve { addr, serving } => {
            let patience = Duration::from_millis(serving.client_timeout);
            let mut made = None;
            let serve = async |routes: &encoder::Routes| {
                let service = match serving.isolate {
                    true => Service::isolated(place, max_tokens, serving).await?,
                    false => Service::new(&load().await?, max_tokens, serving).await?,
                };
                made = Some(service.clone());
                #[cfg(feature = "tokenizers")]
                let service = {
                    let folder = place.model.clone();
                    encoder::off_executor(move || service.with_tokenizer(&folder)).await??
                };
                routes.set(router(service.clone())).ok();
                Err(service.lost().await)
            };
            let ended = listen(addr, patience, serve).await;
            if let Some(service) = made {
                service.close().await;
            }
            ended
        }
        Command::Embed { ids, out, layers } => {
            let texts: Vec<Vec<u32>> = serde_json::from_slice(&std::fs::read(ids)?)?;
            embed(&load().await?, max_tokens, &texts, (&out, layers.as_deref()), start).await
        }
        Command::Load(traffic) => clients::run(traffic, load().await?).await,
        Command::Bench { batch, tokens, rounds } => {
            bench(&load().await?, [batch, tokens], rounds, start).await
        }
    }
}

/// Texts one behind the other, in batches of at most so many tokens.
async fn embed<T: Launches>(
    model: &Model<T>,
    max_tokens: usize,
    texts: &[Vec<u32>],
    (out, layers): (&Path, Option<&Path>),
    start: Instant,
) -> Result<(), Failed> {
    let Config { hidden_size: hidden, max_position_embeddings, vocab_size, .. } = *model.config();
    check(texts, max_position_embeddings.min(max_tokens), vocab_size as u32)?;
    let mut out = BufWriter::new(File::create(out)?);
    let mut layers = layers.map(|file| File::create(file).map(BufWriter::new)).transpose()?;
    let mut lane = model.lane(model.device().stream()?, max_tokens, MOST_TEXTS).await?;
    let mut rest: Vec<&[u32]> = texts.iter().map(|text| &text[..]).collect();
    while !rest.is_empty() {
        let mut tokens = 0;
        let fits = |text: &&&[u32]| {
            tokens += text.len();
            tokens <= max_tokens
        };
        let count = rest.iter().take(MOST_TEXTS).take_while(fits).count();
        let batch: Vec<&[u32]> = rest.drain(..count).collect();
        let rows = lane.embed(&batch).await?;
        if !rows.chunks(hidden).all(is_embedding) {
            return Err(NOT_FINITE.into());
        }
        out.write_all(bytemuck::cast_slice(rows))?;
        if rest.len() + count == texts.len() {
            println!("first_answer {:.1} ms", ms(start.elapsed()));
        }
        let Some(layers) = &mut layers else { continue };
        let states = lane.hidden_states(&batch).await?;
        let mut first = 0;
        for text in batch {
            for state in &states {
                layers.write_all(bytemuck::cast_slice(
                    &state[first * hidden..][..text.len() * hidden],
                ))?;
            }
            first += text.len();
        }
    }
    out.flush()?;
    layers.as_mut().map_or(Ok(()), Write::flush)?;
    Ok(())
}

/// Prints `name value unit` lines.
async fn bench<T: Launches>(
    model: &Model<T>,
    [batch, tokens]: [usize; 2],
    rounds: usize,
    start: Instant,
) -> Result<(), Failed> {
    let vocabulary = model.config().vocab_size;
    let id = |text: usize, at: usize| ((text * 7919 + at * 104_729 + 11) % vocabulary) as u32;
    let texts: Vec<Vec<u32>> =
        (0..batch).map(|text| (0..tokens).map(|at| id(text, at)).collect()).collect();
    let texts: Vec<&[u32]> = texts.iter().map(|text| &text[..]).collect();
    let new = async || model.lane(model.device().stream()?, batch * tokens, batch).await;
    let mut lanes = [new().await?, new().await?];
    lanes[0].embed(&texts).await?;
    println!("first_answer {:.1} ms", ms(start.elapsed()));
    for lane in &mut lanes {
        one_by_one(lane, &texts, rounds.min(10)).await?;
    }
    let mut times = one_by_one(&mut lanes[0], &texts, rounds).await?;
    times.sort_unstable();
    let [p50, p99] = [50, 99].map(|percent| times[(times.len() - 1) * percent / 100]);
    println!("p50 {:.1} us\np99 {:.1} us", p50.as_secs_f64() * 1e6, p99.as_secs_f64() * 1e6);
    let start = Instant::now();
    let [a, b] = &mut lanes;
    tokio::try_join!(one_by_one(a, &texts, rounds), one_by_one(b, &texts, rounds))?;
    let rate = (2 * rounds * batch * tokens) as f64 / start.elapsed().as_secs_f64();
    println!("two_lanes {rate:.0} tokens/s");
    Ok(())
}

async fn one_by_one<T: Launches>(
    lane: &mut Lane<T>,
    texts: &[&[u32]],
    rounds: usize,
) -> gpu_await::Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let start = Instant::now();
        lane.embed(texts).await?;
        times.push(start.elapsed());
    }
    Ok(times)
}
