//! The page of the program `server` in a real browser: it draws what the server does, and says so when
//! there is no server any more.
//!
//! ```text
//! GPU_AWAIT_TEST_BROWSER=/usr/bin/chromium cargo test --test page -- --ignored
//! ```
#![forbid(unsafe_code)]
#![cfg(unix)]

#[path = "under_test/server.rs"]
mod under_test;

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use under_test::{JSON, RAW, Server};

/// A browser is slow to start on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// A headless Chromium with one page, told what to do through its DevTools protocol.
///
/// # Source
/// The Chrome DevTools Protocol over `--remote-debugging-pipe`: JSON, a zero byte behind each message,
/// commands on descriptor 3 and answers on descriptor 4.
struct Browser {
    child: Child,
    commands: ChildStdin,
    answers: Receiver<Value>,
    profile: PathBuf,
    session: Value,
    sent: u64,
}

impl Browser {
    fn start() -> Browser {
        let browser = std::env::var("GPU_AWAIT_TEST_BROWSER")
            .expect("GPU_AWAIT_TEST_BROWSER names a Chromium");
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let profile =
            std::env::temp_dir().join(format!("gpu-await-page-{}-{number}", std::process::id()));
        let mut child = Command::new("sh")
            .args(["-c", r#"exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#, "sh", &browser])
            .args(["--remote-debugging-pipe", "--headless", "--no-sandbox", "--disable-gpu"])
            .args(["--disable-quic", "--no-first-run", "--disable-background-networking"])
            .args(["--disable-component-update", "--disable-sync"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let commands = child.stdin.take().expect("piped");
        let (out, (sender, answers)) = (child.stdout.take().expect("piped"), channel());
        std::thread::spawn(move || {
            for message in BufReader::new(out).split(0).map_while(Result::ok) {
                let message = serde_json::from_slice(&message).expect("JSON");
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut browser =
            Browser { child, commands, answers, profile, session: Value::Null, sent: 0 };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        browser.session = browser.call("Target.attachToTarget", attach)["sessionId"].clone();
        browser
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.sent += 1;
        let mut command = json!({ "id": self.sent, "method": method, "params": params });
        if !self.session.is_null() {
            command["sessionId"] = self.session.clone();
        }
        write!(self.commands, "{command}\0").expect("it listens");
        loop {
            let message = self.answers.recv_timeout(LIMIT).expect("the browser answers");
            if message["id"] == self.sent {
                assert_eq!(message["error"], Value::Null, "{command}");
                return message["result"].clone();
            }
        }
    }

    /// The value of an expression in the page.
    fn value(&mut self, expression: &str) -> Value {
        let evaluate = json!({ "expression": expression, "returnByValue": true });
        let answer = self.call("Runtime.evaluate", evaluate);
        assert_eq!(answer["exceptionDetails"], Value::Null, "{expression}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression in the page is true.
    fn until(&mut self, expression: &str) {
        let end = Instant::now() + LIMIT;
        while self.value(expression) != true {
            if Instant::now() > end {
                panic!("never: {expression}\n{}", self.value("document.body.innerText"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Asked to, it ends its other processes first, which still write to the profile.
        let asked = write!(self.commands, "{{\"id\":0,\"method\":\"Browser.close\"}}\0").is_ok();
        let end = Instant::now() + Duration::from_secs(5);
        while asked && Instant::now() < end && self.child.try_wait().is_ok_and(|end| end.is_none())
        {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.child.kill().ok();
        self.child.wait().ok();
        std::fs::remove_dir_all(&self.profile).ok();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a browser: GPU_AWAIT_TEST_BROWSER=/usr/bin/chromium"]
async fn the_page_shows_what_the_server_does_and_when_it_is_gone() {
    let server = Server::start(&["--streams", "3"]);
    let addr = server.addr;
    let mut browser = Browser::start();
    browser.call("Page.navigate", json!({ "url": format!("http://{addr}/") }));
    browser.until("document.documentElement?.dataset.state === 'ready'");
    assert_eq!(browser.value("document.querySelectorAll('#streams tbody tr').length"), 3);
    assert_eq!(browser.value("document.getElementById('results').textContent"), "0");

    // What is done from now on is drawn, without a reload.
    for tokens in 1..=20 {
        let body = json!({ "tokens": vec![1; tokens] }).to_string();
        assert_eq!(server.post("/embed", JSON, body).await.status, 200);
    }
    assert_eq!(server.post("/embed", JSON, "{}").await.status, 400);
    tokio::task::block_in_place(|| {
        browser.until("document.getElementById('results').textContent === '20'");
        browser.until("document.getElementById('errors').textContent === '1'");
        browser.until("/^[\\d.]+ ms$/.test(document.getElementById('p50').textContent)");
        browser.until("/^[\\d.]+ ms$/.test(document.getElementById('p99').textContent)");
        browser.until("/^\\d+ %$/.test(document.getElementById('busy').textContent)");
        for chart in ["rate", "latency"] {
            browser.until(&format!(
                "/[ML]\\d/.test(document.querySelector('#{chart}-chart .one').getAttribute('d'))"
            ));
        }
        // Nothing of the layout is wider than the window.
        browser.until("document.documentElement.scrollWidth <= innerWidth");
    });
    assert_eq!(browser.value("document.getElementById('banner').textContent"), "");
    assert_eq!(
        browser.value("getComputedStyle(document.getElementById('banner')).display"),
        "none"
    );

    // Errors of clients are shown, and nothing to worry about.
    assert_eq!(browser.value("document.documentElement.dataset.state"), "ready");
    server.signal("TERM");
    tokio::task::block_in_place(|| {
        browser.until("document.documentElement?.dataset.state === 'gone'");
        browser.until("document.getElementById('banner').offsetHeight > 0");
        browser.until("document.getElementById('banner').textContent.includes('has not answered')");
        browser.until("document.title.startsWith('no answer')");
    });
    assert_eq!(browser.value("document.documentElement.dataset.error ?? 'none'"), "none");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a browser: GPU_AWAIT_TEST_BROWSER=/usr/bin/chromium"]
async fn the_page_is_not_green_while_the_server_refuses() {
    let server = Arc::new(Server::start(&["--max-in-flight", "1", "--max-waiting", "0"]));
    let mut browser = Browser::start();
    browser.call("Page.navigate", json!({ "url": format!("http://{}/", server.addr) }));
    browser.until("document.documentElement?.dataset.state === 'ready'");
    let refused = || async {
        let path = "/matmul?m=256&k=64&n=256";
        let calls = (0..16).map(|_| server.post(path, RAW, vec![0; 4 * 2 * 256 * 64]));
        let replies = futures::future::join_all(calls).await;
        replies.iter().filter(|reply| reply.status == 429).count()
    };
    // Until it has happened: one of sixteen at once has the permit.
    while refused().await == 0 {}
    tokio::task::block_in_place(|| {
        browser.until("document.documentElement?.dataset.state === 'refusing'");
        browser.until("document.getElementById('banner').textContent.includes('refused')");
        browser.until("document.title.startsWith('refusing')");
        browser
            .until("/[ML]\\d/.test(document.querySelector('#rate-chart .two').getAttribute('d'))");
        // Ten seconds later that is over.
        browser.until("document.documentElement?.dataset.state === 'ready'");
    });
    assert_eq!(browser.value("document.getElementById('banner').textContent"), "");
    assert_eq!(browser.value("document.documentElement.dataset.error ?? 'none'"), "none");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a browser: GPU_AWAIT_TEST_BROWSER=/usr/bin/chromium"]
async fn the_page_tells_of_a_stalled_device() {
    let server = Server::start(&["--stall-health-after", "1", "--health-timeout-ms", "100"]);
    let mut browser = Browser::start();
    browser.call("Page.navigate", json!({ "url": format!("http://{}/", server.addr) }));
    browser.until("document.documentElement?.dataset.state === 'ready'");
    assert_eq!(server.post("/embed", JSON, r#"{"tokens": [1]}"#).await.status, 200);
    tokio::task::block_in_place(|| {
        browser.until("document.documentElement?.dataset.state === 'stalled'");
        browser.until("document.getElementById('banner').textContent.includes('launch')");
        browser.until("document.documentElement?.dataset.state === 'ready'");
    });
    assert_eq!(browser.value("document.documentElement.dataset.error ?? 'none'"), "none");
}
