//! What the load generator says of servers that are wrong: others go by its exit code.
#![forbid(unsafe_code)]

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output};

fn load(arguments: &[&str]) -> Output {
    let mut path = PathBuf::from(env!("CARGO_BIN_EXE_load"));
    if !path.exists() {
        // Packed tests run on another machine than the one that built them, beside the program.
        path = std::env::current_exe().expect("this binary has a path").with_file_name("load");
    }
    Command::new(path).args(arguments).output().expect("it runs")
}

/// Asks a server that gives every request this answer, for a second; the exit code, and what was said.
fn load_on(head: &'static str, body: &'static str) -> (Option<i32>, String) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("its address"));
    let answer = format!("HTTP/1.1 {head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let (mut socket, answer) = (socket.expect("a connection"), answer.clone());
            std::thread::spawn(move || {
                // How much of a request was read does not matter: there is one at a time.
                let mut some = vec![0; 1 << 20];
                while socket.read(&mut some).is_ok_and(|len| len > 0) {
                    if socket.write_all(answer.as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    let output = load(&[&url, "--seconds", "1", "--connections", "1"]);
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn a_wrong_answer_is_exit_1() {
    let (code, text) = load_on("200 OK\r\ncontent-type: application/json", r#"{"c":[[0.125]]}"#);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("\nwrong: ") && text.contains(" without an answer"), "{text}");
}

#[test]
fn an_answer_that_should_not_be_is_exit_1() {
    let (code, text) = load_on("500 Internal Server Error", "");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("\nunexpected: ") && text.contains(" without an answer"), "{text}");
}

#[test]
fn nothing_but_refusals_is_exit_1() {
    let (code, text) = load_on(
        "429 Too Many Requests\r\nretry-after: 1\r\ncontent-type: application/json",
        r#"{"error":{"kind":"overloaded","message":"too many requests are waiting"}}"#,
    );
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("not one answer was right"), "{text}");
}

#[test]
fn arguments_that_make_no_sense_are_exit_2() {
    for arguments in [&[][..], &["http://127.0.0.1:1", "--rate", "0"], &["http://example.org"]] {
        let output = load(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage: load"));
    }
}
