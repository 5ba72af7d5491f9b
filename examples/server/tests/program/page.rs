//! The page of the program `server` in a real browser: it draws what the server does, and says so when
//! there is no server any more.
//!
//! ```text
//! GPU_AWAIT_TEST_BROWSER=/usr/bin/chromium cargo test --test program page -- --ignored
//! ```
#![forbid(unsafe_code)]
#![cfg(unix)]

use std::sync::Arc;

use serde_json::json;

use crate::browser::Browser;
use crate::under_test::{JSON, RAW, Server};

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
