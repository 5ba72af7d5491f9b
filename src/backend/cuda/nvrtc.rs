//! NVRTC, the run-time compiler for CUDA C++: found at run time, its results as plain integers.
//!
//! It is looked for once per process, where [`library`] says. NVRTC 12 is preferred to 13, because its PTX loads on more drivers. The
//! library opens its builtins by bare name at the first compilation, which fails for a library outside the search path; so they are
//! opened first, from the same folder.
//!
//! Source: the NVRTC manual; all entry points exist since 11.2.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::{Error, ErrorDetail, Result};
use crate::system::library;
use crate::system::library::{NotFound, Search};

const SEARCH: Search = Search {
    variable: "GPU_AWAIT_NVRTC",
    names: &["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so.11.2", "libnvrtc.so"],
};

type Program = *mut c_void;

/// The compiler.
#[expect(non_snake_case, reason = "the library's names")]
pub(crate) struct Nvrtc {
    nvrtcGetErrorString: unsafe extern "C" fn(c_int) -> *const c_char,
    nvrtcVersion: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    nvrtcGetNumSupportedArchs: unsafe extern "C" fn(*mut c_int) -> c_int,
    nvrtcGetSupportedArchs: unsafe extern "C" fn(*mut c_int) -> c_int,
    nvrtcCreateProgram: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    nvrtcDestroyProgram: unsafe extern "C" fn(*mut Program) -> c_int,
    nvrtcAddNameExpression: unsafe extern "C" fn(Program, *const c_char) -> c_int,
    nvrtcGetLoweredName: unsafe extern "C" fn(Program, *const c_char, *mut *const c_char) -> c_int,
    nvrtcCompileProgram: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log: Text,
    ptx: Text,
    cubin: Text,
    /// Never unloaded: the functions above point into it.
    _library: libloading::Library,
}

/// A text or image of a program: the calls for its length and its contents.
struct Text {
    bytes: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    copy: unsafe extern "C" fn(Program, *mut u8) -> c_int,
}

/// The input of a compilation.
pub(crate) struct Job<'a> {
    pub(crate) text: &'a str,
    pub(crate) name: &'a str,
    /// Names and texts of files that `#include` finds.
    pub(crate) headers: &'a [(String, String)],
    /// Instances of templates, as they are written in C++.
    pub(crate) instances: &'a [String],
    pub(crate) options: &'a [String],
    /// Machine code for one architecture instead of PTX.
    pub(crate) cubin: bool,
}

/// The output.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Compiled {
    pub(crate) image: Vec<u8>,
    /// Each instance with its name in the image.
    pub(crate) names: Vec<(String, String)>,
    /// Warnings.
    pub(crate) log: String,
}

impl Nvrtc {
    /// The compiler, looked up once per process.
    pub(crate) fn get() -> Result<&'static Nvrtc> {
        static NVRTC: OnceLock<Nvrtc> = OnceLock::new();
        library::once(&NVRTC, Self::find)
    }

    fn find() -> Result<Nvrtc> {
        SEARCH.find(Nvrtc::open).map_err(|NotFound { looked_for, reason }| {
            ErrorDetail::NoCompiler { looked_for, reason }.into()
        })
    }

    fn open(path: &Path) -> std::result::Result<Nvrtc, String> {
        let builtins = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        for path in builtins.into_iter().flat_map(files).filter(|path| is_builtins(path)) {
            if let Ok(library) = library::open(&path) {
                // Kept as long as the compiler: for ever.
                std::mem::forget(library);
            }
        }
        let library = library::open(path)?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type is the entry point's in the NVRTC manual.
                *unsafe { library.get(concat!($name, "\0")) }
                    .map_err(|_| format!("{} has no `{}`", path.display(), $name))?
            };
        }
        Ok(Nvrtc {
            nvrtcGetErrorString: symbol!("nvrtcGetErrorString"),
            nvrtcVersion: symbol!("nvrtcVersion"),
            nvrtcGetNumSupportedArchs: symbol!("nvrtcGetNumSupportedArchs"),
            nvrtcGetSupportedArchs: symbol!("nvrtcGetSupportedArchs"),
            nvrtcCreateProgram: symbol!("nvrtcCreateProgram"),
            nvrtcDestroyProgram: symbol!("nvrtcDestroyProgram"),
            nvrtcAddNameExpression: symbol!("nvrtcAddNameExpression"),
            nvrtcGetLoweredName: symbol!("nvrtcGetLoweredName"),
            nvrtcCompileProgram: symbol!("nvrtcCompileProgram"),
            log: Text {
                bytes: symbol!("nvrtcGetProgramLogSize"),
                copy: symbol!("nvrtcGetProgramLog"),
            },
            ptx: Text { bytes: symbol!("nvrtcGetPTXSize"), copy: symbol!("nvrtcGetPTX") },
            cubin: Text { bytes: symbol!("nvrtcGetCUBINSize"), copy: symbol!("nvrtcGetCUBIN") },
            _library: library,
        })
    }

    /// Major and minor, if it reports them.
    pub(crate) fn version(&self) -> Option<(i32, i32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are live integers.
        let code = unsafe { (self.nvrtcVersion)(&raw mut major, &raw mut minor) };
        (code == 0).then_some((major, minor))
    }

    /// The architectures that it compiles for, major times ten plus minor.
    pub(crate) fn architectures(&self) -> Vec<u32> {
        let mut count = 0;
        // SAFETY: `count` is a live integer.
        let code = unsafe { (self.nvrtcGetNumSupportedArchs)(&raw mut count) };
        let mut found: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        if code != 0 || found.is_empty() {
            return Vec::new();
        }
        // SAFETY: `found` has room for the number of elements that the library returned.
        match unsafe { (self.nvrtcGetSupportedArchs)(found.as_mut_ptr()) } {
            0 => found.into_iter().filter_map(|one| u32::try_from(one).ok()).collect(),
            _ => Vec::new(),
        }
    }

    /// Compiles, on the calling thread: from milliseconds to minutes.
    ///
    /// # Errors
    /// [`ErrorDetail::Compile`] with the compiler's log.
    pub(crate) fn compile(&self, job: &Job<'_>) -> Result<Compiled> {
        let failed = |reason: String, log: String| -> Error {
            ErrorDetail::Compile { file: job.name.to_owned(), reason, log }.into()
        };
        let c = |text: &str| {
            let c = CString::new(text);
            c.map_err(|_| failed("a text with a NUL byte".to_owned(), String::new()))
        };
        let all = |texts: &mut dyn Iterator<Item = &String>| -> Result<Vec<CString>> {
            texts.map(|text| c(text)).collect()
        };
        let (text, name) = (c(job.text)?, c(job.name)?);
        let header_names = all(&mut job.headers.iter().map(|(name, _)| name))?;
        let header_texts = all(&mut job.headers.iter().map(|(_, text)| text))?;
        let instances = all(&mut job.instances.iter())?;
        let options = all(&mut job.options.iter())?;
        let refused = |code: c_int| failed(self.describe(code), String::new());

        let mut program = OpenProgram { nvrtc: self, raw: std::ptr::null_mut() };
        // SAFETY: all texts live for the call and end with a NUL; the two arrays have the given number of
        // elements.
        let code = unsafe {
            (self.nvrtcCreateProgram)(
                &raw mut program.raw,
                text.as_ptr(),
                name.as_ptr(),
                header_names.len() as c_int,
                pointers(&header_texts).as_ptr(),
                pointers(&header_names).as_ptr(),
            )
        };
        check(code).map_err(refused)?;
        for instance in &instances {
            // SAFETY: the program is alive and not compiled yet; the text ends with a NUL.
            let code = unsafe { (self.nvrtcAddNameExpression)(program.raw, instance.as_ptr()) };
            check(code).map_err(refused)?;
        }
        // SAFETY: the program is alive; the array has the given number of elements.
        let compiled = unsafe {
            let options = pointers(&options);
            (self.nvrtcCompileProgram)(program.raw, options.len() as c_int, options.as_ptr())
        };
        let log = program.read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        check(compiled).map_err(|code| failed(self.describe(code), log.clone()))?;
        let what = if job.cubin { &self.cubin } else { &self.ptx };
        let image = program.read(what).map_err(refused)?;
        let mut names = Vec::new();
        for (written, c) in job.instances.iter().zip(&instances) {
            names.push((written.clone(), program.lowered(c).map_err(refused)?));
        }
        Ok(Compiled { image, names, log })
    }

    /// The library's message for a code.
    fn describe(&self, code: c_int) -> String {
        // SAFETY: any code is valid.
        let text = unsafe { (self.nvrtcGetErrorString)(code) };
        if text.is_null() {
            return format!("NVRTC error {code}");
        }
        // SAFETY: the library's own text, which ends with a NUL and is never freed.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// A program, destroyed when dropped.
struct OpenProgram<'a> {
    nvrtc: &'a Nvrtc,
    raw: Program,
}

impl OpenProgram<'_> {
    fn read(&self, what: &Text) -> std::result::Result<Vec<u8>, c_int> {
        let mut bytes = 0;
        // SAFETY: the program is alive, `bytes` is a live integer.
        check(unsafe { (what.bytes)(self.raw, &raw mut bytes) })?;
        let mut read = vec![0; bytes];
        // SAFETY: the program is alive, `read` has room for the number of bytes that the library returned.
        check(unsafe { (what.copy)(self.raw, read.as_mut_ptr()) })?;
        Ok(read)
    }

    /// An instance's name in the image.
    fn lowered(&self, instance: &CStr) -> std::result::Result<String, c_int> {
        let mut lowered = std::ptr::null();
        // SAFETY: the program is alive and compiled; the text ends with a NUL.
        let code = unsafe {
            (self.nvrtc.nvrtcGetLoweredName)(self.raw, instance.as_ptr(), &raw mut lowered)
        };
        check(code)?;
        // SAFETY: the program's own text, which ends with a NUL and lives as long as it.
        Ok(unsafe { CStr::from_ptr(lowered) }.to_string_lossy().into_owned())
    }
}

impl Drop for OpenProgram<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by the library and destroyed once.
            let _ = unsafe { (self.nvrtc.nvrtcDestroyProgram)(&raw mut self.raw) };
        }
    }
}

fn check(code: c_int) -> std::result::Result<(), c_int> {
    if code == 0 { Ok(()) } else { Err(code) }
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

fn is_builtins(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("libnvrtc-builtins.so.")
}
