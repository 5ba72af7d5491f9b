//! `--check`: serves on a free port, asks, compares each answer with candle's own forward pass on the CPU, and prints
//! `name value unit` lines.
//!
//! | line | what it is |
//! |---|---|
//! | `requests` | requests that were sent at once and answered correctly |
//! | `worst` | largest difference of a number of theirs from the CPU's |
//! | `queue` | how long queueing one forward pass occupies the calling thread |
//! | `alone`, `two` | time to answer one request, and both of two that are sent at once |
//! | `two_over_alone` | their ratio: 1 if the two overlap entirely, 2 if they do not at all |
//! | `tick_idle` | longest time between two ticks of a task that sleeps for a millisecond, on a runtime with one thread and nothing to do |
//! | `tick_busy` | the same while that runtime serves all requests |
//! | `tick_blocking` | the same beside a task that calls candle and its `to_vec1`, one request after the other |
//!
//! Times are medians, except for the ticks.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use candle_core::{Device, Tensor};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{self, Runtime};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::lanes::Lanes;
use crate::model::{Model, VOCABULARY};
use crate::{Failed, app};

const REQUESTS: u32 = 8;
const TOKENS: u32 = 256;
/// Of what is timed; odd, for the median.
const ROUNDS: usize = 9;
/// Sums of thousands of products, in another order than the CPU's.
const TOLERANCE: f32 = 2e-3;
const TICK: Duration = Duration::from_millis(1);

pub(crate) fn run() -> Result<(), Failed> {
    let client = runtime::Builder::new_current_thread().enable_all().build()?;
    let lanes = client.block_on(Lanes::open())?;
    println!("# {}", lanes.device());
    let questions: Arc<[Question]> = Question::all()?.into();

    let server = Server::start(&lanes, 2)?;
    client.block_on(async {
        refusals(server.address).await?;
        let worst = all_at_once(server.address, &questions).await?;
        println!("requests {REQUESTS} answers\nworst {worst:.1e} difference");
        println!("queue {:.3} ms", queue(&lanes, &questions[0]).await?);
        let (alone, two) = overlap(server.address, &questions).await?;
        println!("alone {alone:.3} ms\ntwo {two:.3} ms\ntwo_over_alone {:.2} times", two / alone);
        Ok::<(), Failed>(())
    })?;

    let server = Server::start(&lanes, 1)?;
    let ticks = server.tick();
    client.block_on(async {
        sleep(100 * TICK).await;
        println!("tick_idle {:.2} ms", ticks.take_longest());
        all_at_once(server.address, &questions).await?;
        println!("tick_busy {:.2} ms", ticks.take_longest());
        server.runtime.spawn(blocking(lanes, questions)).await??;
        println!("tick_blocking {:.2} ms", ticks.take_longest());
        Ok(())
    })
}

/// The service on threads of its own.
struct Server {
    runtime: Runtime,
    address: SocketAddr,
}

impl Server {
    fn start(lanes: &Arc<Lanes>, threads: usize) -> Result<Server, Failed> {
        let runtime =
            runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let address = listener.local_addr()?;
        let router = app::router(lanes.clone());
        runtime.spawn(async { axum::serve(listener, router).await });
        Ok(Server { runtime, address })
    }

    /// Starts a task that ticks there.
    fn tick(&self) -> Ticks {
        let ticks = Ticks(Arc::new(AtomicU64::new(0)));
        let longest_ns = ticks.0.clone();
        self.runtime.spawn(async move {
            loop {
                let last = Instant::now();
                sleep(TICK).await;
                let elapsed_ns = last.elapsed().as_nanos() as u64;
                // ORDERING: Relaxed: a figure that publishes nothing.
                longest_ns.fetch_max(elapsed_ns, Ordering::Relaxed);
            }
        });
        ticks
    }
}

struct Ticks(Arc<AtomicU64>);

impl Ticks {
    /// The longest time between two ticks since the last call, in milliseconds.
    fn take_longest(&self) -> f64 {
        // ORDERING: Relaxed: a figure that publishes nothing.
        self.0.swap(0, Ordering::Relaxed) as f64 / 1e6
    }
}

/// A request, and what candle answers on the CPU.
struct Question {
    tokens: Vec<u32>,
    embedding: Vec<f32>,
}

impl Question {
    fn all() -> candle_core::Result<Vec<Question>> {
        let model = Model::new(&Device::Cpu)?;
        let question = |number: u32| {
            let token = |at: u32| (number * 7919 + at * 104_729 + at * at * 31) % VOCABULARY;
            // Of different lengths.
            let tokens: Vec<u32> = (0..TOKENS - number).map(token).collect();
            let embedding = model.forward(&Tensor::new(&*tokens, &Device::Cpu)?)?.to_vec1()?;
            Ok(Question { tokens, embedding })
        };
        (0..REQUESTS).map(question).collect()
    }

    /// Returns the largest difference.
    async fn ask(&self, client: &mut Client) -> Result<f32, Failed> {
        #[derive(Deserialize)]
        struct Answer {
            embedding: Vec<f32>,
        }
        let (status, body) = client.post(json!({ "tokens": self.tokens }).to_string()).await?;
        if status != 200 {
            return Err(format!("status {status}: {}", String::from_utf8_lossy(&body)).into());
        }
        let Answer { embedding } = serde_json::from_slice(&body)?;
        let differences = embedding.iter().zip(&self.embedding).map(|(a, b)| (a - b).abs());
        let worst = differences.fold(0.0, f32::max);
        // A NaN is not within the tolerance either, and `max` skips it.
        let is_right = embedding.len() == self.embedding.len()
            && embedding.iter().all(|number| number.is_finite())
            && worst <= TOLERANCE;
        if !is_right {
            return Err(format!("a wrong answer: {worst} from the CPU's").into());
        }
        Ok(worst)
    }
}

/// A connection.
struct Client(SendRequest<Full<Bytes>>);

impl Client {
    async fn open(address: SocketAddr) -> Result<Client, Failed> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Client(sender))
    }

    async fn post(&mut self, body: String) -> Result<(u16, Bytes), Failed> {
        let request = hyper::Request::post("/embed")
            .header("host", "localhost")
            .header("content-type", "application/json")
            .body(Full::from(body))?;
        self.0.ready().await?;
        let (head, body) = self.0.send_request(request).await?.into_parts();
        Ok((head.status.as_u16(), body.collect().await?.to_bytes()))
    }
}

/// Invalid requests get a 400, and leave the lanes as they are.
async fn refusals(address: SocketAddr) -> Result<(), Failed> {
    let mut client = Client::open(address).await?;
    for tokens in [json!([]), json!([VOCABULARY]), json!(vec![0; 1000])] {
        let (status, _) = client.post(json!({ "tokens": tokens }).to_string()).await?;
        if status != 400 {
            return Err(format!("status {status} for an invalid request").into());
        }
    }
    Ok(())
}

async fn all_at_once(address: SocketAddr, questions: &Arc<[Question]>) -> Result<f32, Failed> {
    let mut asking = JoinSet::new();
    for number in 0..questions.len() {
        let (mut client, questions) = (Client::open(address).await?, questions.clone());
        asking.spawn(async move { questions[number].ask(&mut client).await });
    }
    let mut worst = 0.0f32;
    while let Some(asked) = asking.join_next().await {
        worst = worst.max(asked??);
    }
    Ok(worst)
}

/// Without HTTP.
async fn queue(lanes: &Lanes, question: &Question) -> Result<f64, Failed> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let lane = lanes.next();
        let permit = lane.permit().await;
        let tokens = question.tokens.clone();
        let start = Instant::now();
        let op = lane.queue(tokens, permit)?;
        times.push(start.elapsed());
        op.await?;
    }
    Ok(median_ms(times))
}

/// On the executor's thread, which is what the rest of this crate avoids.
async fn blocking(lanes: Arc<Lanes>, questions: Arc<[Question]>) -> Result<(), Failed> {
    for question in &*questions {
        lanes.next().embed_blocking(&question.tokens)?;
        // The ticks' turn.
        sleep(TICK).await;
    }
    Ok(())
}

async fn overlap(address: SocketAddr, questions: &[Question]) -> Result<(f64, f64), Failed> {
    let (mut a, mut b) = (Client::open(address).await?, Client::open(address).await?);
    let (mut alone, mut two) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = Instant::now();
        questions[0].ask(&mut a).await?;
        alone.push(start.elapsed());
        let start = Instant::now();
        tokio::try_join!(questions[0].ask(&mut a), questions[1].ask(&mut b))?;
        two.push(start.elapsed());
    }
    Ok((median_ms(alone), median_ms(two)))
}

fn median_ms(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}
