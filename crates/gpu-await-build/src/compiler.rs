//! The compilers, found when they are needed: `nvcc` as a program, NVRTC as a library.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use std::{env, fs, io, process, ptr, thread};

use libloading::Library;

use crate::error::{Error, Result};

/// The variables that say where to look for compilers.
pub(crate) const VARIABLES: [&str; 4] =
    ["GPU_AWAIT_NVRTC", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"];

/// How long a program may take to answer.
const LIMIT: Duration = Duration::from_secs(10);

const LIBRARIES: [&str; 3] = ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so.11.2"];

pub(crate) enum Compiler {
    Nvcc(PathBuf),
    /// The library, and the folders of NVIDIA's headers.
    Nvrtc(Library, Vec<PathBuf>),
}

impl Compiler {
    /// The first compiler found, or what was looked for.
    pub(crate) fn find() -> std::result::Result<Compiler, Vec<String>> {
        let value = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let [named, home, path, conda] = VARIABLES.map(value);
        if let Some(named) = named {
            let libraries = LIBRARIES.map(|name| named.join(name));
            let libraries = if named.is_dir() { &libraries[..] } else { &[named] };
            return Self::first(&[], libraries, LIMIT);
        }
        // The empty folder stands for `PATH`, and the loader's path.
        let mut folders = vec![PathBuf::new()];
        for toolkit in home.into_iter().chain(path).chain(["/usr/local/cuda".into()]) {
            folders.extend([toolkit.join("bin"), toolkit.join("lib64")]);
        }
        folders.extend(conda.map(|root| root.join("lib")));
        let programs = |folders: &[PathBuf]| -> Vec<_> {
            folders.iter().map(|folder| folder.join("nvcc")).collect()
        };
        let mut tried = match Self::first(&programs(&folders), &[], LIMIT) {
            Ok(nvcc) => return Ok(nvcc),
            Err(tried) => tried,
        };
        // Where NVIDIA's Python packages are.
        let known = folders.len();
        let program = "import nvidia; print(*nvidia.__path__, sep='\\n')";
        let mut python = Command::new("python3");
        let packages = match answer(python.args(["-c", program]), LIMIT) {
            Ok(packages) => packages,
            Err(why) => {
                tried.push(format!("python3{why}"));
                String::new()
            }
        };
        for packages in packages.lines() {
            let parts = ["cu13/bin", "cu13/lib", "cuda_nvrtc/lib"];
            folders.extend(parts.map(|part| Path::new(packages).join(part)));
        }
        let libraries = folders.iter().flat_map(|folder| LIBRARIES.map(|name| folder.join(name)));
        let libraries: Vec<_> = libraries.collect();
        Self::first(&programs(&folders[known..]), &libraries, LIMIT)
            .map_err(|more| [tried, more].concat())
    }

    pub(crate) fn first(
        programs: &[PathBuf],
        libraries: &[PathBuf],
        limit: Duration,
    ) -> std::result::Result<Compiler, Vec<String>> {
        let mut tried = Vec::new();
        for program in programs {
            match answer(Command::new(program).arg("--version"), limit) {
                Ok(_) => return Ok(Compiler::Nvcc(program.clone())),
                Err(why) => tried.push(format!("{}{why}", program.display())),
            }
        }
        tried.extend(libraries.iter().map(|path| path.display().to_string()));
        libraries.iter().find_map(|path| opened(path)).ok_or(tried)
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Compiler::Nvcc(_) => "nvcc",
            Compiler::Nvrtc(..) => "NVRTC",
        }
    }

    /// Compiles a file to PTX.
    pub(crate) fn compile(&self, source: &Path, options: Vec<String>) -> Result<String> {
        let compiled = match self {
            Compiler::Nvcc(program) => run(program, source, options),
            Compiler::Nvrtc(library, headers) => {
                // As nvcc does on its own.
                let beside = source.parent().filter(|folder| *folder != Path::new(""));
                let folders = [beside.unwrap_or(Path::new(".")).to_owned()];
                let folders = folders.iter().chain(headers);
                let folders = folders.map(|folder| format!("-I{}", folder.display()));
                call(library, source, options.into_iter().chain(folders).collect())
            }
        };
        let (source, compiler) = (source.to_owned(), self.name());
        compiled.map_err(|log| Error::Compile { source, compiler, log })
    }
}

/// What a program prints, or why it is not used, to be appended to its name: nothing if it is not there, or fails.
fn answer(command: &mut Command, limit: Duration) -> std::result::Result<String, String> {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|_| String::new())?;
    let (sender, receiver) = mpsc::channel();
    let stdout = child.stdout.take();
    // A child of it may hold the other end after it has ended: so a thread reads, which is then abandoned.
    thread::spawn(move || {
        let text = stdout.map(io::read_to_string).transpose().ok().flatten();
        sender.send(text).ok();
    });
    let text = receiver.recv_timeout(limit);
    if text.is_err() {
        child.kill().ok();
    }
    let is_good = child.wait().is_ok_and(|status| status.success());
    match text {
        Ok(text) => text.filter(|_| is_good).ok_or_else(String::new),
        Err(_) => {
            let (name, why) =
                (command.get_program().display(), format!(" (no answer in {} s)", limit.as_secs()));
            println!("cargo::warning={name} is not used{why}");
            Err(why)
        }
    }
}

/// Compiles a file to PTX by `nvcc`, or returns what that says.
fn run(nvcc: &Path, source: &Path, options: Vec<String>) -> std::result::Result<String, String> {
    let folder = (0..)
        .map(|at| env::temp_dir().join(format!("gpu-await-{}-{at}", process::id())))
        .find_map(|folder| match fs::create_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
            made => Some(made.map(|()| folder)),
        });
    let folder = folder.unwrap_or_else(|| Err(io::ErrorKind::AlreadyExists.into()));
    let folder = folder.map_err(|error| format!("{}: {error}", env::temp_dir().display()))?;
    let ptx = folder.join("mine.ptx");
    let mut command = Command::new(nvcc);
    command.arg("--ptx").args(options).arg("--output-file").arg(&ptx).arg(source);
    let output = command.output();
    let text = fs::read_to_string(&ptx);
    fs::remove_dir_all(&folder).ok();
    let output = output.map_err(|error| format!("{}: {error}", nvcc.display()))?;
    if output.status.success() {
        return text.map_err(|error| format!("{}: {error}", ptx.display()));
    }
    let said = [output.stderr, output.stdout].concat();
    Err(format!("{}{}: {}", String::from_utf8_lossy(&said), nvcc.display(), output.status))
}

/// NVRTC, with the library that it opens by bare name, which fails outside the loader's path.
fn opened(path: &Path) -> Option<Compiler> {
    let folder = path.parent()?;
    for file in fs::read_dir(folder).into_iter().flatten().flatten() {
        if file.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.") {
            // SAFETY: NVIDIA's libraries run only their own initializers.
            let builtins = unsafe { Library::new(file.path()) };
            // Stays open as long as the process.
            builtins.map(std::mem::forget).ok();
        }
    }
    // SAFETY: as above.
    let library = unsafe { Library::new(path) }.ok()?;
    // In a toolkit, and in Python's packages.
    let headers = ["../include", "../../cuda_runtime/include"].map(|one| folder.join(one));
    Some(Compiler::Nvrtc(library, headers.into_iter().filter(|one| one.is_dir()).collect()))
}

type Program = *mut c_void;
type Texts = *const *const c_char;
type Bytes = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Copy = unsafe extern "C" fn(Program, *mut u8) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, Texts) -> c_int;
type Create =
    unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Texts, Texts) -> c_int;

/// Compiles a file to PTX by NVRTC, or returns what that says. The types above are those of its manual; all entry points exist since CUDA 8.
fn call(
    nvrtc: &Library,
    source: &Path,
    options: Vec<String>,
) -> std::result::Result<String, String> {
    macro_rules! entry_point {
        ($name:literal, $type:ty) => {
            // SAFETY: the type is that of the manual, and the library outlives this call.
            *unsafe { nvrtc.get::<$type>($name) }.map_err(|error| error.to_string())?
        };
    }
    let create = entry_point!("nvrtcCreateProgram", Create);
    let compile = entry_point!("nvrtcCompileProgram", Compile);
    let destroy = entry_point!("nvrtcDestroyProgram", Destroy);
    let log =
        (entry_point!("nvrtcGetProgramLogSize", Bytes), entry_point!("nvrtcGetProgramLog", Copy));
    let ptx = (entry_point!("nvrtcGetPTXSize", Bytes), entry_point!("nvrtcGetPTX", Copy));

    let c = |text: String| CString::new(text).map_err(|error| error.to_string());
    let text = c(fs::read_to_string(source).map_err(|error| error.to_string())?)?;
    let name = c(source.display().to_string())?;
    let options: Vec<_> = options.into_iter().map(c).collect::<std::result::Result<_, _>>()?;
    let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = ptr::null_mut();
    let (none, made) = (ptr::null(), &raw mut program);
    // SAFETY: both texts end with a NUL and live for the call; there are no headers.
    let code = unsafe { create(made, text.as_ptr(), name.as_ptr(), 0, none, none) };
    if code != 0 {
        return Err(format!("nvrtcCreateProgram returns {code}"));
    }
    // SAFETY: the program is alive; `options` has that many texts, which end with a NUL.
    let code = unsafe { compile(program, options.len() as c_int, options.as_ptr()) };
    let (bytes, copy) = if code == 0 { ptx } else { log };
    let mut count = 0;
    // SAFETY: the program is alive, `count` a live integer.
    unsafe { bytes(program, &raw mut count) };
    let mut read = vec![0; count];
    // SAFETY: the program is alive, `read` has room for what the library said.
    unsafe { copy(program, read.as_mut_ptr()) };
    // SAFETY: the program is alive, and not used again.
    unsafe { destroy(&raw mut program) };
    let read = String::from_utf8_lossy(&read).into_owned();
    if code == 0 { Ok(read) } else { Err(read.trim_end_matches(['\0', '\n']).to_owned()) }
}
