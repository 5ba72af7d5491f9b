//! Committed PTX is used where it matches and refused where it does not; with a compiler, where there is one: the NVRTC of `kernels/build.py`, and
//! what [`Compiler::find`] finds.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::time::Duration;

use super::*;

const KERNELS: &str = "#include \"parts/factor.cuh\"
extern \"C\" __global__ void twice(float* x) { x[threadIdx.x] *= FACTOR; }
extern \"C\" __global__ void thrice(float* x) { x[threadIdx.x] *= FACTOR + OFFSET; }
";
const FACTOR: &str = "#include \"offset.cuh\"\n#define FACTOR 2.0f\n";

/// A package with one file that includes another one, which includes a third; deleted on drop.
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

    /// Why there is no PTX where nothing compiles it.
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
    Compiler::first(&[], &[library], Duration::ZERO).ok()
}

/// All compilers found.
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
    let made = make(&package, &ptx);
    assert!(made.contains("\n// compiler: nvcc 12.0.140 --gpu-architecture=compute_75 -DBY=2\n"));
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
    for what in [
        "mine.cu",
        "mine.ptx was missing",
        "pip install nvidia-cuda-nvrtc-cu12",
        "nvidia-cuda-runtime-cu12",
        "/opt/libnvrtc",
    ] {
        assert!(told.contains(what), "{what}: {told}");
    }
    // Without `committed` no stale PTX is reported.
    ptx.committed = false;
    assert_eq!(package.refused(&ptx), None);
    let error = super::ptx("no.cu").made(none).unwrap_err();
    assert!(error.to_string().starts_with("no.cu: "), "{error}");
}

#[test]
fn what_a_file_includes() {
    let package = Package::new("includes");
    let text = "  # include <here.cuh>\n#include <cuda_fp16.h>\n#include NAME\n";
    package.write("mine.cu", text);
    // Includes in a cycle, and of files beside it.
    package.write("parts/here.cuh", "#include \"../mine.cu\"\n#include \"factor.cuh\"\n");
    let files = |folders: &[PathBuf]| -> Vec<String> {
        let files = Inputs::read(&package.0.join("mine.cu"), folders, &[]).unwrap().files;
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
        // From here on no compiler is needed.
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
        assert!(!error.contains('\0'), "{error:?}");
        assert!(!package.0.join("mine.ptx").exists());
    }
}

/// What `kernels/build.py` wrote.
#[test]
fn an_example_needs_no_compiler() {
    for name in ["encoder", "decoder"] {
        let source = root().join(format!("examples/{name}/src/{name}.cu"));
        if source.exists() {
            let options = ["--std=c++03", "--fmad=false", "--ftz=false"];
            let kernels = options.into_iter().fold(ptx(source).arch("compute_80"), Ptx::option);
            kernels.committed().made(|| panic!("no compiler is looked for")).unwrap();
        }
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

/// A fake compiler that runs a shell command; `$out` is the file to write.
fn shell(package: &Package, name: &str, does: &str) -> PathBuf {
    let out = "while [ $# -gt 0 ]; do [ \"$1\" = --output-file ] && out=$2; shift; done";
    let (file, text) = (package.0.join(name), format!("#!/bin/sh\n{out}\n{does}\n"));
    // In a separate process: a file that another thread's child has inherited open for writing cannot be executed.
    let write = "printf %s \"$1\" > \"$0\" && chmod +x \"$0\"";
    let status = process::Command::new("sh").args(["-c", write]).arg(&file).arg(text).status();
    assert!(status.unwrap().success());
    file
}

const PTX: &str = "[ -z \"$out\" ] || printf '// release 12.0, V12.0.140\\n.version 8.0\\n.target sm_75\\n' > \"$out\"";

/// Makes the committed PTX, with a fake compiler that ignores the source.
fn make(package: &Package, ptx: &Ptx) -> String {
    ptx.made(|| Ok(Compiler::Nvcc(shell(package, "nvcc", PTX)))).unwrap()
}

/// Runs the calling test again, in a process with these variables, where `is_script` is true.
fn script(test: &str, variables: &[(&str, &Path)]) -> String {
    let mut command = process::Command::new(env::current_exe().unwrap());
    command.args(["--exact", "--nocapture", &format!("tests::{test}")]).env("AS_SCRIPT", "1");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8(said).unwrap();
    assert!(output.status.success(), "{said}");
    said
}

fn is_script() -> bool {
    env::var_os("AS_SCRIPT").is_some()
}

#[test]
fn every_spelling_of_an_include() {
    for (at, line) in [
        "/**/ #include \"parts/one.cuh\"",
        "#include /* \"no.cuh\" */ \"parts/one.cuh\"",
        "# /* a # */ include/**/<one.cuh>",
        "#inc\\\nlude \"par\\\nts/one.cuh\"",
        "#include \\\r\n \"parts/one.cuh\"",
        "%:include \"parts/one.cuh\"",
        "??=include \"parts/one.cuh\"",
        "#include_next <one.cuh>",
        "#import \"parts/one.cuh\"",
        "const char* s = \"/*\";\n#include \"parts/one.cuh\"",
        "// a slash at the end /\n/* \\\n*/ #include \"parts/one.cuh\"",
    ]
    .into_iter()
    .enumerate()
    {
        let package = Package::new(&format!("spelling{at}"));
        package.write("mine.cu", line);
        package.write("parts/one.cuh", "1");
        let ptx = package.ptx().include(package.0.join("parts"));
        make(&package, &ptx);
        package.write("parts/one.cuh", "2");
        assert_eq!(package.refused(&ptx), Some(Stale::Source), "{line}");
    }
}

#[test]
fn folders_and_files_of_options() {
    let package = Package::new("options");
    package.write("mine.cu", "#include \"one.cuh\"\n");
    let parts = package.0.join("parts").display().to_string();
    let forms: [&[String]; 6] = [
        &[format!("-I{parts}")],
        &["-I".into(), parts.clone()],
        &[format!("--include-path={parts}")],
        &[format!("-isystem=/nowhere,{parts}")],
        &[format!("--pre-include={parts}/one.cuh")],
        &["-include".into(), format!("{parts}/one.cuh")],
    ];
    for form in forms {
        package.write("parts/one.cuh", "1");
        let ptx = form.iter().fold(package.ptx(), Ptx::option);
        fs::remove_file(package.0.join("mine.ptx")).ok();
        make(&package, &ptx);
        package.write("parts/one.cuh", "2");
        assert_eq!(package.refused(&ptx), Some(Stale::Source), "{form:?}");
    }
}

/// The same bytes in sequence, divided differently or included under another name.
#[test]
fn text_that_moves_between_files() {
    let package = Package::new("moves");
    package.write("mine.cu", "#include \"h.cuh\"\n#define T 1\n");
    package.write("h.cuh", "int x;\n");
    let ptx = package.ptx();
    make(&package, &ptx);
    package.write("mine.cu", "#include \"h.cuh\"\n");
    package.write("h.cuh", "#define T 1\nint x;\n");
    assert_eq!(package.refused(&ptx), Some(Stale::Source));

    package.write("mine.cu", "#include \"a.cuh\"\n#include \"b.cuh\"\n");
    package.write("a.cuh", "int a;\n");
    package.write("b.cuh", "int b;\n");
    fs::remove_file(package.0.join("mine.ptx")).unwrap();
    make(&package, &ptx);
    package.write("a.cuh", "int b;\n");
    package.write("b.cuh", "int a;\n");
    assert_eq!(package.refused(&ptx), Some(Stale::Source));
}

/// A package is committed here and built there.
#[test]
fn a_package_that_moves() {
    let (here, there) = (Package::new("here"), Package::new("there"));
    let made = make(&here, &here.ptx());
    there.write("mine.ptx", &made);
    assert_eq!(there.ptx().made(|| panic!("no compiler is looked for")).unwrap(), made);
}

#[test]
fn a_ptx_that_is_cut() {
    let package = Package::new("cut");
    let ptx = package.ptx();
    let made = make(&package, &ptx);
    let lines: Vec<_> = made.lines().collect();
    for count in 1..lines.len() {
        package.write("mine.ptx", &lines[..count].join("\n"));
        assert!(package.refused(&ptx).is_some(), "{count} lines");
    }
    package.write("mine.ptx", &made.replace("sm_75", "sm_70"));
    let told = package.refused(&ptx).unwrap().to_string();
    assert!(told.contains("cut short"), "{told}");
    // As an editor leaves it, or Git on Windows.
    package.write("mine.ptx", &made.replace('\n', "\r\n"));
    assert!(package.refused(&ptx.clone().arch("compute_80")).is_some());
    assert!(ptx.made(|| panic!("no compiler is looked for")).is_ok());
}

#[test]
fn headers_that_include_one_another() {
    let package = Package::new("circle");
    for folder in ["a", "b"] {
        fs::create_dir(package.0.join(folder)).unwrap();
    }
    let all = "#include \"../a/x.cuh\"\n#include \"../b/y.cuh\"\n#include \"../b/../a/z.cuh\"\n";
    for file in ["a/x.cuh", "b/y.cuh", "a/z.cuh"] {
        package.write(file, all);
    }
    package.write("mine.cu", "#include \"a/x.cuh\"\n");
    let inputs = Inputs::read(&package.0.join("mine.cu"), &[], &[]).unwrap();
    assert_eq!(inputs.files.len(), 4);
}

/// Cargo watches for a header that would be found first, without running the script each time because a file is missing.
#[test]
fn a_nearer_header_that_appears() {
    let package = Package::new("nearer");
    fs::create_dir(package.0.join("far")).unwrap();
    package.write("mine.cu", "#include \"one.cuh\"\n#include <parts/sub/two.cuh>\n");
    package.write("far/one.cuh", "");
    let read = || Inputs::read(&package.0.join("mine.cu"), &[package.0.join("far")], &[]).unwrap();
    let folder = package.0.canonicalize().unwrap();
    assert_eq!(read().watched, [folder.clone(), folder.join("far")]);
    assert_eq!(read().files.len(), 2);
    package.write("one.cuh", "");
    assert_eq!(read().files[1], folder.join("one.cuh"));
}

#[test]
fn the_source_is_not_written() {
    let package = Package::new("itself");
    package.write("mine.ptx", "mine");
    let error = ptx(package.0.join("mine.ptx")).committed();
    let error = error.made(|| Ok(Compiler::Nvcc(shell(&package, "nvcc", PTX)))).unwrap_err();
    assert!(error.to_string().contains("would overwrite"), "{error}");
    assert_eq!(package.read("mine.ptx"), "mine");
}

#[test]
fn two_sources_of_one_name() {
    if is_script() {
        let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
        let package = Package(out.join("package"));
        // The third is the first one again.
        let all =
            ["a", "b", "a"].map(|folder| ptx(package.0.join(folder).join("mine.cu")).compile());
        let error = all[1].as_ref().unwrap_err().to_string();
        assert!(all[0].is_ok() && all[2].is_ok() && error.contains("Rename one"), "{error}");
        for name in ["a/mine.cu", "b/mine.cu"] {
            assert!(error.contains(name), "{error}");
        }
        return;
    }
    let package = Package::new("two");
    for folder in ["package/a", "package/b"] {
        fs::create_dir_all(package.0.join(folder)).unwrap();
        package.write(&format!("{folder}/mine.cu"), folder);
    }
    shell(&package, "nvcc", PTX);
    script("two_sources_of_one_name", &[("OUT_DIR", &package.0), ("PATH", &package.0)]);
}

#[test]
fn an_empty_folder_to_write_to() {
    if is_script() {
        let error = ptx("src/none.cu").compile().unwrap_err().to_string();
        return assert!(error.starts_with("OUT_DIR: not set"), "{error}");
    }
    script("an_empty_folder_to_write_to", &[("OUT_DIR", Path::new(""))]);
}

#[test]
fn python_is_not_asked_without_need() {
    if is_script() {
        assert!(matches!(Compiler::find(), Ok(Compiler::Nvcc(_))));
        return;
    }
    let package = Package::new("python");
    shell(&package, "nvcc", PTX);
    shell(&package, "python3", &format!("echo > {}/asked", package.0.display()));
    script("python_is_not_asked_without_need", &[("PATH", &package.0)]);
    assert!(!package.0.join("asked").exists());
}

#[test]
fn a_program_that_hangs() {
    let package = Package::new("hangs");
    let nvcc = shell(&package, "nvcc", "exec sleep 1000");
    let tried = Compiler::first(&[nvcc], &[], Duration::from_secs(1)).err().unwrap();
    assert!(tried[0].ends_with("nvcc (no answer in 1 s)"), "{tried:?}");
}

#[test]
fn what_nvcc_says() {
    let package = Package::new("says");
    // The folders' paths are longer than a file's name may be.
    let long = package.0.join("d".repeat(200)).join("d".repeat(200));
    fs::create_dir_all(&long).unwrap();
    fs::write(long.join("mine.cu"), "").unwrap();
    let told = |name: &str, does: &str| {
        let nvcc = Compiler::Nvcc(shell(&package, name, does));
        nvcc.compile(&long.join("mine.cu"), Vec::new()).map_err(|error| error.to_string())
    };
    assert!(told("good", PTX).unwrap().contains(".version 8.0"));
    assert!(told("killed", "kill -9 $$").unwrap_err().contains("signal: 9 (SIGKILL)"));
    let failed = told("fails", "echo mistake >&2; exit 3").unwrap_err();
    assert!(failed.contains("mistake\n") && failed.contains("exit status: 3"), "{failed}");
    assert!(told("nothing", "exit 0").unwrap_err().contains("mine.ptx: No such file"));
}
