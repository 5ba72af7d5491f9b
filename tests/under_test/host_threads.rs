//! Threads of this process, by their names.
#![allow(dead_code, reason = "each test uses a part of it")]

/// How many threads run the streams of the host device with that ordinal; 0 where the system does not
/// tell.
pub(crate) fn threads_of_host(ordinal: usize) -> usize {
    threads_called(&format!("host:{ordinal}-"))
}

/// How many threads have a name that begins so; 0 where the system does not tell.
pub(crate) fn threads_called(name: &str) -> usize {
    if cfg!(not(target_os = "linux")) {
        return 0;
    }
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|known| known.starts_with(name)).count()
}
