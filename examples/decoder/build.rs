//! The PTX of `decoder.cu`: the committed one, or where that is not of this source any more, what the compiler that is there makes.
#![forbid(unsafe_code)]

fn main() -> Result<(), gpu_await_build::Error> {
    let kernels = gpu_await_build::ptx("src/decoder.cu").arch("compute_80");
    // No globals of NVRTC's headers; multiply-adds where the source says so, and nowhere else.
    let options = ["--std=c++03", "--fmad=false", "--ftz=false"];
    options.into_iter().fold(kernels, gpu_await_build::Ptx::option).committed().compile()
}
