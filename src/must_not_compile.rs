//! Programs that must not compile, each beside the same program that does.
//!
//! Kernel arguments: the right ones.
//! ```
//! # use gpu_await::*;
//! fn f(k: &Kernel<(f32, In<f32>, InOut<f32>)>, s: &Stream, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) {
//!     let _ = s.launch(k, LaunchConfig::for_elements(4), (2.0, x, y)).queued();
//! }
//! ```
//! One too few:
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(k: &Kernel<(f32, In<f32>, InOut<f32>)>, s: &Stream, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) {
//!     let _ = s.launch(k, LaunchConfig::for_elements(4), (2.0, x)).queued();
//! }
//! ```
//! One too many:
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(k: &Kernel<(f32, In<f32>, InOut<f32>)>, s: &Stream, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) {
//!     let _ = s.launch(k, LaunchConfig::for_elements(4), (2.0, x, y, 1u32)).queued();
//! }
//! ```
//! A value of another type:
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(k: &Kernel<(f32, In<f32>, InOut<f32>)>, s: &Stream, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) {
//!     let _ = s.launch(k, LaunchConfig::for_elements(4), (2.0f64, x, y)).queued();
//! }
//! ```
//! An array of another element type:
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(k: &Kernel<(f32, In<f32>, InOut<f32>)>, s: &Stream, x: &DeviceBuffer<f64>, y: &mut DeviceBuffer<f32>) {
//!     let _ = s.launch(k, LaunchConfig::for_elements(4), (2.0, x, y)).queued();
//! }
//! ```
//! A shared array where the kernel writes:
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(k: &Kernel<(f32, In<f32>, InOut<f32>)>, s: &Stream, x: &DeviceBuffer<f32>, y: &DeviceBuffer<f32>) {
//!     let _ = s.launch(k, LaunchConfig::for_elements(4), (2.0, x, y)).queued();
//! }
//! ```
//! The same array read and written:
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(k: &Kernel<(f32, In<f32>, InOut<f32>)>, s: &Stream, y: &mut DeviceBuffer<f32>) {
//!     let _ = s.launch(k, LaunchConfig::for_elements(4), (2.0, &*y, y)).queued();
//! }
//! ```
//! The same array written twice; halves are fine:
//! ```
//! # use gpu_await::*;
//! fn f(k: &Kernel<(InOut<f32>, InOut<f32>)>, s: &Stream, y: &mut DeviceBuffer<f32>) -> Result<()> {
//!     let (mut a, mut b) = y.split_at_mut(2)?;
//!     s.launch(k, LaunchConfig::for_elements(4), (&mut a, &mut b)).queued()
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(k: &Kernel<(InOut<f32>, InOut<f32>)>, s: &Stream, y: &mut DeviceBuffer<f32>) -> Result<()> {
//!     s.launch(k, LaunchConfig::for_elements(4), (&mut *y, &mut *y)).queued()
//! }
//! ```
//! A declared kernel checks its arguments like one loaded at run time:
//! ```
//! # use gpu_await::*;
//! fn f(k: &kernels::axpy, s: &Stream, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<()> {
//!     k.launch(s, 2.0, x, y).queued()
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(k: &kernels::axpy, s: &Stream, x: &DeviceBuffer<f32>, y: &DeviceBuffer<f32>) -> Result<()> {
//!     k.launch(s, 2.0, x, y).queued()
//! }
//! ```
//! A declaration vouches for its own geometry and derived arguments: safe code cannot bypass them, even
//! in the module that declares it.
//! ```
//! # use gpu_await::*;
//! # kernel! { pub unsafe fn whole(x: &mut [f32], n: u64 = x.len()); launch = LaunchConfig::for_elements(x.len()); ptx = ""; }
//! fn f(k: &whole, s: &Stream, x: &mut DeviceBuffer<f32>) -> Result<()> {
//!     // SAFETY: one element, which is there.
//!     let kernel = unsafe { k.kernel.kernel() };
//!     s.launch(kernel, LaunchConfig::for_elements(1), (&mut x.slice_mut(..1)?, 1)).queued()
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! # kernel! { pub unsafe fn whole(x: &mut [f32], n: u64 = x.len()); launch = LaunchConfig::for_elements(x.len()); ptx = ""; }
//! fn f(k: &whole, s: &Stream, x: &mut DeviceBuffer<f32>) -> Result<()> {
//!     s.launch(&k.kernel, LaunchConfig::for_elements(1), (x, 1u64 << 40)).queued()
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! # kernel! { pub unsafe fn whole(x: &mut [f32], n: u64 = x.len()); launch = LaunchConfig::for_elements(x.len()); ptx = ""; }
//! fn f(k: &whole, s: &Stream, x: &mut DeviceBuffer<f32>) -> Result<()> {
//!     s.launch(k.kernel.kernel(), LaunchConfig::for_elements(1), (x, 1u64 << 40)).queued()
//! }
//! ```
//! Nor can one declaration take another's kernel, even with the same types:
//! ```
//! # use gpu_await::*;
//! # kernel! { pub unsafe fn whole(x: &mut [f32], n: u64 = x.len()); launch = LaunchConfig::for_elements(x.len()); ptx = ""; }
//! fn f(k: &whole) -> whole {
//!     whole { kernel: k.kernel.clone() }
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! # kernel! { pub unsafe fn whole(x: &mut [f32], n: u64 = x.len()); launch = LaunchConfig::for_elements(x.len()); ptx = ""; }
//! # kernel! { pub unsafe fn any(x: &mut [f32], n: u64); ptx = ""; }
//! fn f(k: &whole) -> any {
//!     any { kernel: k.kernel.clone() }
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! # kernel! { pub unsafe fn whole(x: &mut [f32], n: u64 = x.len()); launch = LaunchConfig::for_elements(x.len()); ptx = ""; }
//! fn f(kernel: Kernel<(InOut<f32>, u64)>) -> whole {
//!     whole { kernel }
//! }
//! ```
//! A declaration is a promise, which needs `unsafe`:
//! ```compile_fail
//! # use gpu_await::*;
//! kernel! { pub fn whole(x: &mut [f32]); launch = LaunchConfig::for_elements(x.len()); ptx = ""; }
//! ```
//! The twin has the types of the declaration; the error for a mismatch shows both:
//! ```
//! # use gpu_await::*;
//! kernel! { pub unsafe fn whole(a: f32, x: &[f32], y: Out<[f32]>, n: u64 = y.len()); host = twin; }
//! fn twin(_: &Grid, _: f32, _: &[f32], _: &mut [f32], _: u64) {}
//! ```
//! ```compile_fail,E0308
//! # use gpu_await::*;
//! kernel! { pub unsafe fn whole(a: f32, x: &[f32], y: Out<[f32]>, n: u64 = y.len()); host = twin; }
//! fn twin(_: &Grid, _: f32, _: &[f32], _: &[f32], _: u64) {}
//! ```
//! ```compile_fail,E0308
//! # use gpu_await::*;
//! kernel! { pub unsafe fn whole(a: f32, x: &[f32], y: Out<[f32]>, n: u64 = y.len()); host = twin; }
//! fn twin(_: &Grid, _: f32, _: &[f32], _: &mut [f32]) {}
//! ```
//! Expressions in a declaration need `unsafe` of their own for unsafe calls: a condition, a geometry, a derived
//! argument, the code.
//! ```
//! # use gpu_await::*;
//! # unsafe fn four() -> usize { 4 }
//! kernel! {
//!     pub unsafe fn whole(x: &mut [f32], n: u64 = unsafe { four() } as u64) where x.len() == unsafe { four() }.wide();
//!     launch = LaunchConfig::for_elements(unsafe { four() });
//!     ptx = "";
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! # unsafe fn four() -> usize { 4 }
//! kernel! { pub unsafe fn whole(x: &mut [f32]) where x.len() == four().wide(); ptx = ""; }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! # unsafe fn four() -> usize { 4 }
//! kernel! { pub unsafe fn whole(x: &mut [f32]); launch = LaunchConfig::for_elements(four()); ptx = ""; }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! # unsafe fn four() -> usize { 4 }
//! kernel! { pub unsafe fn whole(x: &mut [f32], n: u64 = four() as u64); launch = LaunchConfig::for_elements(x.len()); ptx = ""; }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! # unsafe fn pick() -> fn(&Grid, &mut [f32]) { |_, _| () }
//! kernel! { pub unsafe fn whole(x: &mut [f32]); host = pick(); }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! # unsafe fn text() -> String { String::new() }
//! kernel! { pub unsafe fn whole(x: &mut [f32]); ptx = text(); }
//! ```
//! A binary image is a promise and needs `unsafe`; PTX is text:
//! ```
//! # use gpu_await::*;
//! fn f(cubin: Vec<u8>, ptx: String) -> [Image; 2] {
//!     // SAFETY: from the compiler, whole.
//!     [unsafe { Image::binary(cubin) }, Image::ptx(ptx)]
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(cubin: Vec<u8>) -> Image {
//!     Image::binary(cubin)
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(cubin: Vec<u8>) -> Image {
//!     Image::ptx(cubin)
//! }
//! ```
//! Looking up a kernel in an image is a promise as well:
//! ```
//! # use gpu_await::*;
//! fn f(m: &Module) -> Result<Kernel<(f32,)>> {
//!     // SAFETY: checked against the source.
//!     unsafe { m.kernel("k") }
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(m: &Module) -> Result<Kernel<(f32,)>> {
//!     m.kernel("k")
//! }
//! ```
//! An untracked view is a promise, and no view outlives its buffer:
//! ```
//! # use gpu_await::*;
//! fn f(x: &DeviceBuffer<f32>) -> View<'_, u32> {
//!     // SAFETY: nothing writes it.
//!     unsafe { x.view().untracked() }.cast().unwrap()
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(x: &DeviceBuffer<f32>) -> View<'_, u32> {
//!     x.view().untracked().cast().unwrap()
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(x: DeviceBuffer<f32>) -> View<'static, u32> {
//!     x.view().cast().unwrap()
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(x: &mut DeviceBuffer<f32>) -> (ViewMut<'_, f32>, ViewMut<'_, u32>) {
//!     (x.view_mut(), x.view_mut().cast().unwrap())
//! }
//! ```
//! A host value must be awaited:
//! ```
//! # use gpu_await::*;
//! fn f(s: &Stream, x: &DeviceBuffer<f32>) -> Op<PinnedBuffer<f32>> {
//!     s.download(x)
//! }
//! fn g(s: &Stream) -> Result<DeviceBuffer<f32>> {
//!     s.zeros(3).queued()
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(s: &Stream, x: &DeviceBuffer<f32>) -> Result<PinnedBuffer<f32>> {
//!     s.download(x).queued()
//! }
//! ```
//! Lent pinned memory cannot be used until it is returned:
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(s: &Stream, pinned: PinnedBuffer<f32>, x: &mut DeviceBuffer<f32>) -> f32 {
//!     let _op = s.upload_into(pinned, x);
//!     pinned[0]
//! }
//! ```
//! A value lent inside a batch cannot be read there:
//! ```
//! # use gpu_await::*;
//! fn f(s: &Stream, x: &DeviceBuffer<f32>) -> Op<PinnedBuffer<f32>> {
//!     s.batch(|q| { let y = q.download(x)?; Ok(y) })
//! }
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(s: &Stream, x: &DeviceBuffer<f32>) -> Op<PinnedBuffer<f32>> {
//!     s.batch(|q| { let y = q.download(x)?; let _ = y[0]; Ok(y) })
//! }
//! ```
//! A batch's queue stays on its thread:
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(s: &Stream) {
//!     let _ = s.batch(|q| {
//!         std::thread::scope(|t| { t.spawn(|| q.zeros::<f32>(3).map(drop)); });
//!         Ok(())
//!     });
//! }
//! ```
//! An element type has a size, and an alignment that device memory provides:
//! ```
//! # use gpu_await::*;
//! #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
//! #[repr(C, align(256))]
//! struct Aligned([u8; 256]);
//! Device::host().stream()?.empty::<Aligned>(1).queued()?;
//! # Ok::<(), Error>(())
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
//! #[repr(C, align(512))]
//! struct Aligned([u8; 512]);
//! Device::host().stream()?.empty::<Aligned>(1).queued()?;
//! # Ok::<(), Error>(())
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! Device::host().stream()?.empty::<[f32; 0]>(1).queued()?;
//! # Ok::<(), Error>(())
//! ```
//! The same holds for a kernel's declared types, values included:
//! ```
//! # use gpu_await::*;
//! fn twin(_: &Grid, _: &mut [u8], _: [u8; 1]) {}
//! Kernel::<(InOut<u8>, Value<[u8; 1]>)>::host(&Device::host(), "k", twin)?;
//! # Ok::<(), Error>(())
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn twin(_: &Grid, _: &mut [[u8; 0]]) {}
//! Kernel::<(InOut<[u8; 0]>,)>::host(&Device::host(), "k", twin)?;
//! # Ok::<(), Error>(())
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
//! #[repr(C, align(512))]
//! struct Aligned([u8; 512]);
//! fn twin(_: &Grid, _: &[Aligned]) {}
//! Kernel::<(In<Aligned>,)>::host(&Device::host(), "k", twin)?;
//! # Ok::<(), Error>(())
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! fn twin(_: &Grid, _: [u8; 0]) {}
//! Kernel::<(Value<[u8; 0]>,)>::host(&Device::host(), "k", twin)?;
//! # Ok::<(), Error>(())
//! ```
//! Pinned memory is aligned to 128 bytes:
//! ```
//! # use gpu_await::*;
//! #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
//! #[repr(C, align(128))]
//! struct Aligned([u8; 128]);
//! Device::host().pinned::<Aligned>(1)?;
//! # Ok::<(), Error>(())
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
//! #[repr(C, align(256))]
//! struct Aligned([u8; 256]);
//! Device::host().pinned::<Aligned>(1)?;
//! # Ok::<(), Error>(())
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! Device::host().pinned::<()>(1)?;
//! # Ok::<(), Error>(())
//! ```
//! The closure of a graph captures nothing, so nothing in it can be stale: values that change are passed.
//! ```
//! # use gpu_await::*;
//! # fn f(device: &Device, scale: kernels::scale) -> Graph<(InOut<f32>, f32)> {
//! device.graph(scale, |q, scale, (mut x, factor)| scale.launch(q, factor, &mut x))
//! # }
//! # f(&Device::host(), kernels::scale::load_blocking(&Device::host())?);
//! # Ok::<(), Error>(())
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! # fn f(device: &Device, scale: kernels::scale) -> Graph<(InOut<f32>,)> {
//! let factor = 2.0;
//! device.graph(scale, move |q, scale, (mut x,)| scale.launch(q, factor, &mut x))
//! # }
//! # f(&Device::host(), kernels::scale::load_blocking(&Device::host())?);
//! # Ok::<(), Error>(())
//! ```
//! It cannot await:
//! ```compile_fail
//! # use gpu_await::*;
//! # fn f(device: &Device, scale: kernels::scale) -> Graph<(InOut<f32>,)> {
//! device.graph(scale, |q, scale, (mut x,)| {
//!     scale.launch(q, 2.0, &mut x)?;
//!     q.done().await
//! })
//! # }
//! ```
//! Its arguments do not outlive the call:
//! ```compile_fail
//! # use gpu_await::*;
//! # use std::sync::Mutex;
//! static KEPT: Mutex<Option<View<'static, f32>>> = Mutex::new(None);
//! # fn f(device: &Device) -> Graph<(In<f32>,)> {
//! device.graph((), |_, (), (x,)| {
//!     *KEPT.lock().unwrap() = Some(x);
//!     Ok(())
//! })
//! # }
//! ```
//! Only plain data can be uploaded:
//! ```compile_fail
//! # use gpu_await::*;
//! fn f(s: &Stream) {
//!     let _ = s.upload(vec![String::new()]);
//! }
//! ```
#![forbid(unsafe_code)]
