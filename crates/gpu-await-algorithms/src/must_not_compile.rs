//! Programs that must not compile, each beside the same program that does.
//!
//! Formulas need a type that has the operators.
//! ```
//! # use gpu_await::*;
//! # use gpu_await_algorithms::*;
//! fn f(s: &Stream, x: &DeviceBuffer<u32>, y: &mut DeviceBuffer<u32>, flags: &mut DeviceBuffer<u8>) {
//!     let _ = s.transform(transform!(|x| x & 1), (x,), y).queued();
//!     let _ = s.transform_flags(transform!(|x| x.gt(1)), (x,), flags).queued();
//! }
//! # let s = Device::host().stream().unwrap();
//! # let x = s.full(1, 3u32).queued().unwrap();
//! # f(&s, &x, &mut s.zeros(1).queued().unwrap(), &mut s.zeros(1).queued().unwrap());
//! ```
//! Bitwise operators on a floating point number:
//! ```compile_fail
//! # use gpu_await::*;
//! # use gpu_await_algorithms::*;
//! fn f(s: &Stream, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) {
//!     let _ = s.transform(transform!(|x| x & 1), (x,), y).queued();
//! }
//! # let s = Device::host().stream().unwrap();
//! # f(&s, &s.zeros(1).queued().unwrap(), &mut s.zeros(1).queued().unwrap());
//! ```
//! The square root of an integer:
//! ```compile_fail
//! # use gpu_await::*;
//! # use gpu_await_algorithms::*;
//! fn f(s: &Stream, x: &DeviceBuffer<u32>, y: &mut DeviceBuffer<u32>) {
//!     let _ = s.transform(transform!(|x| x.sqrt()), (x,), y).queued();
//! }
//! # let s = Device::host().stream().unwrap();
//! # f(&s, &s.zeros(1).queued().unwrap(), &mut s.zeros(1).queued().unwrap());
//! ```
//! A fractional literal with integers:
//! ```compile_fail
//! # use gpu_await::*;
//! # use gpu_await_algorithms::*;
//! fn f(s: &Stream, x: &DeviceBuffer<u32>, y: &mut DeviceBuffer<u32>) {
//!     let _ = s.transform(transform!(|x| x + 0.5), (x,), y).queued();
//! }
//! # let s = Device::host().stream().unwrap();
//! # f(&s, &s.zeros(1).queued().unwrap(), &mut s.zeros(1).queued().unwrap());
//! ```
//! A comparison where numbers are stored:
//! ```compile_fail
//! # use gpu_await::*;
//! # use gpu_await_algorithms::*;
//! fn f(s: &Stream, x: &DeviceBuffer<u8>, y: &mut DeviceBuffer<u8>) {
//!     let _ = s.transform(transform!(|x| x.gt(1)), (x,), y).queued();
//! }
//! # let s = Device::host().stream().unwrap();
//! # f(&s, &s.zeros(1).queued().unwrap(), &mut s.zeros(1).queued().unwrap());
//! ```
//! Bitwise reductions are for integers, not for floats:
//! ```
//! # use gpu_await::*;
//! # use gpu_await_algorithms::*;
//! fn f(s: &Stream, x: &DeviceBuffer<u32>) {
//!     drop(s.reduce(x, BitOp::Xor, 0));
//! }
//! # let s = Device::host().stream().unwrap();
//! # f(&s, &s.zeros(1).queued().unwrap());
//! ```
//! ```compile_fail
//! # use gpu_await::*;
//! # use gpu_await_algorithms::*;
//! fn f(s: &Stream, x: &DeviceBuffer<f32>) {
//!     drop(s.reduce(x, BitOp::Xor, 0.0));
//! }
//! # let s = Device::host().stream().unwrap();
//! # f(&s, &s.zeros(1).queued().unwrap());
//! ```
//! A number where flags are stored:
//! ```compile_fail
//! # use gpu_await::*;
//! # use gpu_await_algorithms::*;
//! fn f(s: &Stream, x: &DeviceBuffer<u8>, y: &mut DeviceBuffer<u8>) {
//!     let _ = s.transform_flags(transform!(|x| x + 1), (x,), y).queued();
//! }
//! # let s = Device::host().stream().unwrap();
//! # f(&s, &s.zeros(1).queued().unwrap(), &mut s.zeros(1).queued().unwrap());
//! ```
//! The type of a formula's argument is a number type, or that of an array of numbers:
//! ```
//! # use gpu_await::*;
//! # use gpu_await_algorithms::*;
//! fn is<S: OperandType<Element = f32>>() {}
//! is::<In<f32>>();
//! ```
//! User types cannot implement it:
//! ```compile_fail,E0277
//! # use gpu_await::*;
//! # use gpu_await_algorithms::*;
//! struct Mine;
//! impl OperandType for Mine {
//!     type Element = f32;
//!     const IS_SCALAR: bool = true;
//! }
//! ```
#![forbid(unsafe_code)]
