//! The threads of a host device.

/// How many threads run the streams of the host device with that ordinal; 0 where the system does not
/// tell.
pub(crate) fn threads_of_host(ordinal: usize) -> usize {
    if cfg!(not(target_os = "linux")) {
        return 0;
    }
    let name = format!("host:{ordinal}-");
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|known| known.starts_with(&name)).count()
}
