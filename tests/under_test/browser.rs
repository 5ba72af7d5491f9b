//! A headless browser for tests of pages.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A browser is slow to start on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// A headless Chromium with one page, told what to do through its DevTools protocol.
///
/// # Source
/// The Chrome DevTools Protocol over `--remote-debugging-pipe`: JSON, a zero byte behind each message,
/// commands on descriptor 3 and answers on descriptor 4.
pub(crate) struct Browser {
    child: Child,
    commands: ChildStdin,
    answers: Receiver<Value>,
    profile: PathBuf,
    session: Value,
    sent: u64,
}

impl Browser {
    pub(crate) fn start() -> Browser {
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

    pub(crate) fn call(&mut self, method: &str, params: Value) -> Value {
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
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let evaluate = json!({ "expression": expression, "returnByValue": true });
        let answer = self.call("Runtime.evaluate", evaluate);
        assert_eq!(answer["exceptionDetails"], Value::Null, "{expression}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression in the page is true.
    pub(crate) fn until(&mut self, expression: &str) {
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
