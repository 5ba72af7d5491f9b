//! The page of a trace in a real browser: it draws the lanes, zooms, and says of an operation when it was and what it waited for.
//!
//! ```text
//! GPU_AWAIT_TEST_BROWSER=/usr/bin/chromium cargo test --test one_at_a_time timeline_page -- --ignored
//! ```

use gpu_await::testing::{self, Gate};
use gpu_await::{Result, kernels};
use serde_json::json;

use crate::under_test::browser::Browser;

#[tokio::test]
#[ignore = "needs a browser: GPU_AWAIT_TEST_BROWSER=/usr/bin/chromium"]
async fn the_page_draws_a_trace() -> Result<()> {
    let device = testing::device();
    let (a, b) =
        (device.stream()?, device.stream_builder().name("</script><b>\"reader\"").build()?);
    let scale = kernels::scale::load(&device).await?;
    let mut x = a.full(100_000, 1.0_f32).await?;
    device.timeline().start(1000)?;
    let gate = Gate::close(&a)?;
    scale.launch(&a, 2.0, &mut x).queued()?;
    let read = b.download(&x);
    gate.open();
    read.await?;
    let trace = device.timeline().snapshot()?;
    let number = trace.operations().iter().position(|op| &*op.name == "download").expect("it");
    let op = &trace.operations()[number];
    let mut page = Vec::new();
    trace.write_html(&mut page).expect("memory");
    let file = std::env::temp_dir().join(format!("gpu-await-timeline-{}.html", std::process::id()));
    std::fs::write(&file, page).expect("a file");

    let mut browser = Browser::start();
    browser.call("Page.navigate", json!({ "url": format!("file://{}", file.display()) }));
    browser.until("window.timeline !== undefined");
    assert_eq!(browser.value("timeline.ops.length"), trace.operations().len());
    let lanes = browser.value("timeline.lanes.map(lane => lane.name)");
    let lanes: Vec<&str> =
        lanes.as_array().expect("names").iter().filter_map(|n| n.as_str()).collect();
    assert!(lanes.len() == 2 && lanes[1].ends_with("\"</script><b>\"reader\"\""), "{lanes:?}");

    // Its gaps are those of the report; one that is clicked fills a third of the lanes.
    let report = trace.report();
    let gaps = browser
        .value("Array.from(document.querySelectorAll('#gaps button')).map(gap => gap.textContent)");
    assert_eq!(gaps, json!(report.gaps.iter().map(ToString::to_string).collect::<Vec<_>>()));
    browser.value("document.querySelector('#gaps button').click()");
    let part = browser.value("timeline.range[1] - timeline.range[0]").as_f64().expect("a number");
    let length_us = report.gaps[0].length.as_nanos() as f64 / 1e3;
    assert!((part / length_us - 3.0).abs() < 0.01, "{part} of {length_us} us");

    // Where its bar is, the canvas has the color of a copy to the host.
    browser.value(&format!(
        "var op = timeline.ops[{number}]; timeline.show(op.started - 1, op.completed + 1)"
    ));
    let color = browser.value(
        "Array.from(document.getElementById('lanes').getContext('2d').getImageData(
            (timeline.x(op.started) + timeline.x(op.completed)) / 2 * devicePixelRatio,
            (timeline.y(op) + 6) * devicePixelRatio, 1, 1).data.slice(0, 3))",
    );
    assert_eq!(color, json!([0x15, 0x80, 0x3d]));

    // A click on it shows its times, and whom it waited for.
    browser.value(
        "var box = document.getElementById('lanes').getBoundingClientRect();
         var at = [box.x + (timeline.x(op.started) + timeline.x(op.completed)) / 2, box.y + timeline.y(op) + 10]",
    );
    let place = browser.value("at");
    for kind in ["mousePressed", "mouseReleased"] {
        browser.call(
            "Input.dispatchMouseEvent",
            json!({
                "type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1,
            }),
        );
    }
    browser.until("document.getElementById('why') !== null");
    let why = browser.value("document.getElementById('why').textContent");
    assert!(why.as_str().is_some_and(|why| why.contains("scale, operation")), "{why}");
    let (started, completed) = op.device_time().expect("its times");
    let took_us = (completed - started).as_nanos() as f64 / 1e3;
    let took = browser.value("op.completed - op.started").as_f64().expect("a number");
    assert!((took - took_us).abs() < 0.002, "{took} and not {took_us} us");
    for time in ["submitted", "started", "completed", "seen", "polled"] {
        let shown = browser.value(&format!("document.getElementById('{time}').textContent"));
        assert!(shown.as_str().is_some_and(|shown| shown.contains("s")), "{time}: {shown}");
    }

    // It zooms, moves, and comes back.
    browser.value("timeline.show(...timeline.whole)");
    let all = browser.value("timeline.range[1] - timeline.range[0]").as_f64().expect("a number");
    browser.value("document.getElementById('in').click()");
    let half = browser.value("timeline.range[1] - timeline.range[0]").as_f64().expect("a number");
    assert!((half - all / 2.0).abs() < 1e-6 * all, "{all} {half}");
    browser.value("document.getElementById('all').click()");
    assert_eq!(browser.value("timeline.range[1] - timeline.range[0]").as_f64(), Some(all));
    browser.until("document.documentElement.scrollWidth <= innerWidth");
    std::fs::remove_file(file).expect("it is there");
    Ok(())
}
