//! The GPUs of this machine, as the kernel's driver lists them: without a CUDA call or a process for one.
//!
//! A worker may use a GPU that exists (`/proc/driver/nvidia/gpus`), has a device file here, and is not hidden by this process's own
//! `CUDA_VISIBLE_DEVICES`. A process of a worker gets that variable with one UUID, and its GPU is number 0 there.
//!
//! # Invariants
//! 1. A worker is never placed on a GPU that the variable hides; a list that cannot be understood without CUDA is an error, not a guess
//!    (`visible_devices_are_respected`).
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;

use crate::error::{Error, Result};

/// A GPU that workers may use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gpu {
    /// As `nvidia-smi -L` writes it: what [`WorkerBuilder::gpu`](crate::WorkerBuilder::gpu) takes.
    pub uuid: String,
    /// Its model.
    pub name: String,
    /// Its address on the bus.
    bus: String,
}

/// Returns the GPUs that workers of this process may use, in bus order. Empty where there is no driver.
///
/// # Errors
/// [`Error::NoGpu`]: `CUDA_VISIBLE_DEVICES` names GPUs by numbers, and GPUs of several models are numbered by their speed, which only CUDA
/// knows: name them by UUIDs, or set `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
pub fn gpus() -> Result<Vec<Gpu>> {
    let all = present(Path::new("/proc/driver/nvidia/gpus"), Path::new("/dev"));
    let by_bus = std::env::var("CUDA_DEVICE_ORDER").is_ok_and(|order| order == "PCI_BUS_ID");
    visible(all, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref(), by_bus)
}

/// Returns the GPU with a name that [`DeviceBuilder::named`](gpu_await::DeviceBuilder::named) takes: `cuda:N`, `cuda`, `auto`, or `host`, which has none:
/// a worker without [`WorkerBuilder::gpu`](crate::WorkerBuilder::gpu) is on the host device. `auto` is the first GPU, if there is one. `N` counts
/// in the order of [`gpus`], which differs from CUDA's where models are mixed, unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
///
/// # Errors
/// [`Error::NoGpu`]: there is no such GPU, or no such name; otherwise as [`gpus`].
pub fn gpu_named(name: &str) -> Result<Option<Gpu>> {
    match name.trim() {
        "host" => Ok(None),
        name => numbered(name, gpus()?),
    }
}

/// The GPU of that name, which is not `host`.
fn numbered(name: &str, mut gpus: Vec<Gpu>) -> Result<Option<Gpu>> {
    let number = match name {
        "" | "auto" if gpus.is_empty() => return Ok(None),
        "" | "auto" | "cuda" => "0",
        _ => name.strip_prefix("cuda:").unwrap_or(name),
    };
    match number.parse() {
        Ok(at) if at < gpus.len() && number != name => Ok(Some(gpus.swap_remove(at))),
        _ => Err(none(number, &gpus)),
    }
}

/// The UUID that this is, or is the beginning of.
pub(crate) fn find(wanted: &str) -> Result<String> {
    // MIG instances are not in the kernel's list: CUDA in the process finds them, or fails.
    if wanted.starts_with("MIG-") {
        return Ok(wanted.to_owned());
    }
    let gpus = gpus()?;
    // An empty name would match any UUID.
    let found = gpus.iter().find(|gpu| !wanted.is_empty() && gpu.uuid.starts_with(wanted));
    found.map(|gpu| gpu.uuid.clone()).ok_or_else(|| none(wanted, &gpus))
}

fn none(wanted: &str, found: &[Gpu]) -> Error {
    let found = found.iter().map(|gpu| gpu.uuid.clone()).collect();
    Error::NoGpu { wanted: wanted.to_owned(), found }
}

/// The GPUs in the kernel's list that have a device file.
fn present(list: &Path, files: &Path) -> Vec<Gpu> {
    let folders = fs::read_dir(list).into_iter().flatten().flatten();
    let mut gpus: Vec<_> = folders
        .filter_map(|folder| {
            let text = fs::read_to_string(folder.path().join("information")).ok()?;
            let field = |name: &str| {
                let line = text.lines().find_map(|line| line.strip_prefix(name))?;
                Some(line.trim_start_matches(':').trim().to_owned())
            };
            let minor = field("Device Minor")?;
            files.join(format!("nvidia{minor}")).exists().then_some(())?;
            let bus = folder.file_name().to_string_lossy().into_owned();
            Some(Gpu { uuid: field("GPU UUID")?, name: field("Model")?, bus })
        })
        .collect();
    gpus.sort_by(|one, other| one.bus.cmp(&other.bus));
    gpus
}

/// The GPUs that the variable leaves visible, in its order.
fn visible(all: Vec<Gpu>, variable: Option<&str>, by_bus: bool) -> Result<Vec<Gpu>> {
    let Some(variable) = variable else { return Ok(all) };
    let one_model = all.windows(2).all(|pair| pair[0].name == pair[1].name);
    let mut left: Vec<Gpu> = Vec::new();
    for entry in variable.split(',').map(str::trim) {
        let gpu = match entry.parse::<usize>() {
            Ok(_) if !one_model && !by_bus => {
                let wanted = format!("with the number {entry} in CUDA_VISIBLE_DEVICES");
                return Err(none(&wanted, &all));
            }
            Ok(number) => all.get(number),
            Err(_) if entry.is_empty() => None,
            Err(_) => all.iter().find(|gpu| gpu.uuid.starts_with(entry)),
        };
        // CUDA ends its list at the first entry that it does not know.
        match gpu {
            Some(gpu) if !left.contains(gpu) => left.push(gpu.clone()),
            _ => break,
        }
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str, name: &str, bus: &str) -> Gpu {
        Gpu { uuid: uuid.into(), name: name.into(), bus: bus.into() }
    }

    #[test]
    fn visible_devices_are_respected() {
        let all = vec![gpu("GPU-aa11", "H200", "1"), gpu("GPU-bb22", "H200", "2")];
        let mixed = vec![gpu("GPU-aa11", "H200", "1"), gpu("GPU-bb22", "T4", "2")];
        let names = |gpus: Result<Vec<Gpu>>| -> Vec<String> {
            gpus.unwrap().into_iter().map(|gpu| gpu.uuid).collect()
        };
        assert_eq!(names(visible(all.clone(), None, false)), ["GPU-aa11", "GPU-bb22"]);
        assert_eq!(names(visible(all.clone(), Some(""), false)), [""; 0]);
        assert_eq!(names(visible(all.clone(), Some("1,0"), false)), ["GPU-bb22", "GPU-aa11"]);
        assert_eq!(names(visible(all.clone(), Some("GPU-bb"), false)), ["GPU-bb22"]);
        assert_eq!(names(visible(all.clone(), Some("1,7,0"), false)), ["GPU-bb22"]);
        assert_eq!(names(visible(all, Some("-1"), false)), [""; 0]);
        assert!(visible(mixed.clone(), Some("1"), false).is_err());
        assert_eq!(names(visible(mixed, Some("1"), true)), ["GPU-bb22"]);
    }

    #[test]
    fn names_are_those_of_devices() {
        let all = || vec![gpu("GPU-aa11", "H200", "1"), gpu("GPU-bb22", "H200", "2")];
        for (name, uuid) in [
            ("auto", "aa11"),
            ("", "aa11"),
            ("cuda", "aa11"),
            ("cuda:0", "aa11"),
            ("cuda:1", "bb22"),
        ] {
            let found = numbered(name, all()).unwrap().unwrap();
            assert_eq!(found.uuid, format!("GPU-{uuid}"), "{name}");
        }
        assert_eq!((numbered("auto", vec![]).unwrap(), gpu_named("host").unwrap()), (None, None));
        for wrong in ["cuda:2", "cuda:", "cuda:-1", "1", "gpu"] {
            let error = numbered(wrong, all()).unwrap_err();
            assert!(matches!(error, Error::NoGpu { .. }), "{wrong}: {error}");
        }
        assert!(numbered("cuda", vec![]).is_err());
    }

    #[test]
    fn the_kernels_list_is_read() {
        let folder = std::env::temp_dir().join(format!("gpu-await-gpus-{}", std::process::id()));
        let (list, files) = (folder.join("gpus"), folder.join("dev"));
        fs::create_dir_all(&files).unwrap();
        for (bus, minor) in [("0000:4e:00.0", "1"), ("0000:1b:00.0", "0"), ("0000:9f:00.0", "2")] {
            fs::create_dir_all(list.join(bus)).unwrap();
            let text = format!(
                "Model: \t\t NVIDIA H200\nIRQ:   \t\t 1\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n"
            );
            fs::write(list.join(bus).join("information"), text).unwrap();
        }
        for minor in [0, 1] {
            fs::write(files.join(format!("nvidia{minor}")), "").unwrap();
        }
        let found: Vec<_> = present(&list, &files).into_iter().map(|gpu| gpu.uuid).collect();
        fs::remove_dir_all(folder).unwrap();
        // The third GPU is not visible in this container.
        assert_eq!(found, ["GPU-0", "GPU-1"]);
    }
}
