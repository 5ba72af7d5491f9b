//! Committed PTX is taken where it fits and refused where not; with a compiler, where there is one: the NVRTC of `kernels/build.py`, and what
//! [`Compiler::find`] finds.
#![forbid(unsafe_code)]

use std::cell::Cell;

use super::*;

const KERNELS: &str = "#include \"parts/factor.cuh\"
extern \"C\" __global__ void twice(float* x) { x[threadIdx.x] *= FACTOR; }
extern \"C\" __global__ void thrice(float* x) { x[threadIdx.x] *= FACTOR + OFFSET; }
";
const FACTOR: &str = "#include \"offset.cuh\"\n#define FACTOR 2.0f\n";

/// A package of one file that includes another one, which includes a third; gone with this.
struct Package(PathBuf);

impl Package {
    fn new(name: &str) -> Package {
        let folder = format!("gpu-await-build-{}-{name}", process::id());
        let package = Package(env::temp_dir().join(folder));
        fs::create_dir_all(package.0.join("parts")).unwrap();
        package.write("mine.cu", KERNELS);
        package.write("parts/factor.cuh", FACTOR);
        package.write("parts/offset.cuh", "#define OFFSET 1.0f\n");
        package
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).unwrap();
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).unwrap()
    }

    fn ptx(&self) -> Ptx {
        ptx(self.0.join("mine.cu")).option("-DBY=2").committed()
    }

    /// Why there is none where nothing compiles it.
    fn refused(&self, ptx: &Ptx) -> Option<Stale> {
        match ptx.made(|| Err(vec!["nvcc".to_owned()])) {
            Err(Error::NoCompiler { source, stale, looked_for }) => {
                assert_eq!((source, looked_for.len()), (self.0.join("mine.cu"), 1));
                stale
            }
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for Package {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// The repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn nvrtc_12_0() -> Option<Compiler> {
    let library = root().join("target/nvrtc-12.0/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    Compiler::first(&[], &[library]).ok()
}

/// All that are there.
fn compilers() -> Vec<Compiler> {
    let compilers: Vec<_> = nvrtc_12_0().into_iter().chain(Compiler::find().ok()).collect();
    println!("with {:?}", compilers.iter().map(Compiler::name).collect::<Vec<_>>());
    compilers
}

#[test]
fn a_committed_ptx_is_taken_while_it_fits() {
    let package = Package::new("fits");
    let ptx = package.ptx();
    assert_eq!(package.refused(&ptx), Some(Stale::Missing));
    let digest = Inputs::read(&ptx.source, &[]).unwrap().digest;
    let made = format!(
        "// source-sha256: {digest}\n// compiler: NVRTC 12.0.140 --gpu-architecture=compute_75 -DBY=2\n.version 8.0\n"
    );
    package.write("mine.ptx", &made);
    let take = || ptx.made(|| panic!("no compiler is looked for"));
    assert_eq!(take().unwrap(), made);
    // As Git writes it on Windows.
    package.write("mine.cu", &KERNELS.replace('\n', "\r\n"));
    package.write("mine.ptx", &made.replace('\n', "\r\n"));
    assert!(take().is_ok());

    let other = ptx.clone().arch("compute_80");
    let stale = package.refused(&other).unwrap();
    let (committed, now) =
        ("--gpu-architecture=compute_75 -DBY=2", "--gpu-architecture=compute_80 -DBY=2");
    assert_eq!(stale, Stale::Options { committed: committed.into(), now: now.into() });
    for (file, text) in [
        ("mine.cu", KERNELS.replace("twice", "double_")),
        ("parts/factor.cuh", FACTOR.replace("2.0", "4.0")),
        ("parts/offset.cuh", String::new()),
        ("mine.ptx", ".version 8.0".to_owned()),
        ("mine.ptx", String::new()),
    ] {
        let before = package.read(file);
        package.write(file, &text);
        assert_eq!(package.refused(&ptx), Some(Stale::Source), "{file}");
        package.write(file, &before);
        assert!(take().is_ok());
    }
}

#[test]
fn no_compiler_says_what_to_install() {
    let package = Package::new("none");
    let mut ptx = package.ptx();
    let none = || Err(vec!["nvcc".to_owned(), "/opt/libnvrtc.so.12".to_owned()]);
    let told = format!("{:?}", ptx.made(none).unwrap_err());
    for what in
        ["mine.cu", "mine.ptx was missing", "pip install nvidia-cuda-nvrtc-cu12", "/opt/libnvrtc"]
    {
        assert!(told.contains(what), "{what}: {told}");
    }
    // Without a committed one nothing is said of it.
    ptx.committed = false;
    assert_eq!(package.refused(&ptx), None);
    let error = super::ptx("no.cu").made(none).unwrap_err();
    assert!(error.to_string().starts_with("no.cu: "), "{error}");
}

#[test]
fn what_a_file_includes() {
    let package = Package::new("includes");
    let text = "  # include <here.cuh>\n#include <cuda_fp16.h>\n#include NAME\n// #include \"parts/factor.cuh\" too\n";
    package.write("mine.cu", text);
    // In a circle, and beside itself.
    package.write("parts/here.cuh", "#include \"../mine.cu\"\n#include \"factor.cuh\"\n");
    let files = |folders: &[PathBuf]| -> Vec<String> {
        let files = Inputs::read(&package.0.join("mine.cu"), folders).unwrap().files;
        let name = |file: &PathBuf| file.file_name().unwrap().to_string_lossy().into_owned();
        files.iter().map(name).collect()
    };
    assert_eq!(files(&[]), ["mine.cu"]);
    let folder = [package.0.join("parts")];
    assert_eq!(files(&folder)[..2], ["mine.cu", "here.cuh"]);
    assert!(files(&folder).iter().any(|file| file == "offset.cuh"));
}

#[test]
fn what_is_stale_is_compiled_afresh() {
    for (at, compiler) in compilers().into_iter().enumerate() {
        let package = Package::new(&format!("afresh{at}"));
        let ptx = package.ptx();
        let compiler = Cell::new(Some(compiler));
        let made = ptx.made(|| Ok(compiler.take().unwrap())).unwrap();
        assert_eq!(package.read("mine.ptx"), made);
        for kernel in [".entry twice(", ".entry thrice("] {
            assert!(made.contains(kernel), "{made}");
        }
        assert!(made.contains("\n.target sm_75\n"), "{made}");
        // From now on nobody needs a compiler.
        assert_eq!(ptx.made(|| panic!("no compiler is looked for")).unwrap(), made);
    }
}

#[test]
fn a_mistake_is_told_with_its_line() {
    for (at, compiler) in compilers().into_iter().enumerate() {
        let package = Package::new(&format!("mistake{at}"));
        package.write("mine.cu", "\nint f() { return unheard_of; }\n");
        let error = package.ptx().made(|| Ok(compiler)).unwrap_err().to_string();
        assert!(error.contains("mine.cu(2)") && error.contains("unheard_of"), "{error}");
        assert!(!package.0.join("mine.ptx").exists());
    }
}

#[test]
fn the_bytes_are_those_of_the_repository() {
    let Some(nvrtc) = nvrtc_12_0() else { return println!("no NVRTC 12.0") };
    let options = ["--std=c++03", "--fmad=false", "--ftz=false"];
    let scale = ptx(root().join("kernels/scale.cu")).arch("compute_60");
    let scale = options.iter().fold(scale, |scale, option| scale.option(*option));
    let committed = fs::read_to_string(root().join("kernels/scale.ptx")).unwrap();
    assert_eq!(scale.made(|| Ok(nvrtc)).unwrap(), committed);
}
