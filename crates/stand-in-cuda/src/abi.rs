//! The C side of the driver's interface: codes, handles, and pointers that only a C caller can
//! make.

use std::ffi::{CStr, c_char, c_int, c_void};

/// A `CUresult`, as a number: a test may inject one that `cuda.h` has never heard of.
pub(crate) type Code = c_int;

/// What a driver function answers before it becomes a [`Code`].
pub(crate) type Outcome<T = ()> = Result<T, Code>;

/// A `CUstream`, `CUevent`, `CUcontext`, ...: a pointer in C, only ever compared here. 0 is null.
pub(crate) type Handle = usize;

/// A `CUdeviceptr` or a host pointer. Device memory is host memory here, so the two have the same
/// values.
pub(crate) type Address = usize;

/// The `CUresult`s the stand-in gives.
pub(crate) mod code {
    use super::Code;

    pub(crate) const SUCCESS: Code = 0;
    pub(crate) const INVALID_VALUE: Code = 1;
    pub(crate) const OUT_OF_MEMORY: Code = 2;
    pub(crate) const NOT_INITIALIZED: Code = 3;
    pub(crate) const INVALID_DEVICE: Code = 101;
    pub(crate) const INVALID_IMAGE: Code = 200;
    pub(crate) const INVALID_CONTEXT: Code = 201;
    pub(crate) const PEER_ACCESS_UNSUPPORTED: Code = 217;
    pub(crate) const INVALID_PTX: Code = 218;
    pub(crate) const OPERATING_SYSTEM: Code = 304;
    pub(crate) const INVALID_HANDLE: Code = 400;
    pub(crate) const NOT_FOUND: Code = 500;
    pub(crate) const NOT_READY: Code = 600;
    pub(crate) const ILLEGAL_ADDRESS: Code = 700;
    pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
    pub(crate) const CONTEXT_IS_DESTROYED: Code = 709;
    pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: Code = 712;
    pub(crate) const HOST_MEMORY_NOT_REGISTERED: Code = 713;
    pub(crate) const LAUNCH_FAILED: Code = 719;
    pub(crate) const COOPERATIVE_LAUNCH_TOO_LARGE: Code = 720;
    pub(crate) const NOT_PERMITTED: Code = 800;
    pub(crate) const NOT_SUPPORTED: Code = 801;
    pub(crate) const INVALID_CLUSTER_SIZE: Code = 912;
    pub(crate) const INVALID_RESOURCE_TYPE: Code = 914;
    pub(crate) const INVALID_RESOURCE_CONFIGURATION: Code = 915;
}

/// A pointer through which a driver function answers.
///
/// Rust code cannot make one: it arrives as an argument from C, whose contract (`cuda.h`) is that
/// it is null or may be written. Every `SAFETY` comment below rests on that.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Refuses a null pointer, before anything has been done.
    pub(crate) fn check(&self) -> Outcome {
        if self.0.is_null() { Err(code::INVALID_VALUE) } else { Ok(()) }
    }

    /// Reads the value behind an in-and-out parameter; `None` if the pointer is null.
    pub(crate) fn peek(&self) -> Option<T>
    where
        T: Copy,
    {
        // SAFETY: null becomes `None`; the C caller of an in-and-out parameter has initialized it.
        unsafe { self.0.as_ref() }.copied()
    }

    /// Writes the answer; `INVALID_VALUE` if the pointer is null.
    pub(crate) fn put(self, value: T) -> Outcome {
        self.check()?;
        // SAFETY: not null, checked above; a C caller hands over only pointers that may be written
        // (see the type).
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Writes the answer if the caller wants it.
    pub(crate) fn put_if_wanted(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, checked above; a C caller hands over only pointers that may be
            // written (see the type).
            unsafe { self.0.write(value) };
        }
    }

    /// Exchanges the value behind an in-and-out parameter.
    pub(crate) fn replace(self, value: T) -> Outcome<T> {
        self.check()?;
        // SAFETY: not null, checked above; the C caller of an in-and-out parameter has initialized
        // it.
        Ok(unsafe { self.0.replace(value) })
    }
}

impl Out<c_void> {
    /// Where `cuda.h` says of what type the answer to a question is.
    pub(crate) fn of<T>(self) -> Out<T> {
        Out(self.0.cast())
    }
}

impl Out<c_char> {
    /// Takes a buffer that a C caller hands over as a number, as the values of JIT options are.
    ///
    /// # Safety
    /// The number is 0 or a pointer that may be written, as `cuda.h` says of the option.
    pub(crate) unsafe fn from_option(value: usize) -> Self {
        Out(std::ptr::with_exposed_provenance_mut(value))
    }

    /// Writes `text` with a closing NUL, cut to `capacity` bytes, and returns how many bytes of
    /// text fitted.
    pub(crate) fn put_text(self, text: &str, capacity: usize) -> usize {
        let Some(room) = capacity.checked_sub(1) else { return 0 };
        if self.0.is_null() {
            return 0;
        }
        let length = text.len().min(room);
        // SAFETY: `length` bytes of `text` are readable; the C caller says that `capacity > length`
        // bytes may be written.
        unsafe { self.0.copy_from_nonoverlapping(text.as_ptr().cast(), length) };
        // SAFETY: `length < capacity`, so the byte is inside what the caller gave.
        let end = unsafe { self.0.add(length) };
        // SAFETY: as above, inside what the caller gave.
        unsafe { end.write(0) };
        length
    }
}

/// An array that a C caller hands over. As with [`Out`], Rust code cannot make one.
#[repr(transparent)]
pub(crate) struct Array<T>(*mut T);

impl<T: Copy> Array<T> {
    /// One that a C caller put into a struct.
    pub(crate) fn of(elements: *const T) -> Self {
        Array(elements.cast_mut())
    }

    /// Whether the caller gave none.
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Reads the first `length` elements; none if the array is null.
    ///
    /// # Safety
    /// If it is not null, the caller gave at least `length` initialized elements.
    pub(crate) unsafe fn read(&self, length: usize) -> Vec<T> {
        if self.0.is_null() || length == 0 {
            return Vec::new();
        }
        // SAFETY: not null, and `length` initialized elements by this function's contract; nobody
        // writes during the call.
        unsafe { std::slice::from_raw_parts(self.0, length) }.to_vec()
    }

    /// Overwrites element `index`.
    ///
    /// # Safety
    /// The array is not null and has more than `index` elements, which may be written.
    pub(crate) unsafe fn write(&self, index: usize, value: T) {
        // SAFETY: inside the array by this function's contract.
        let element = unsafe { self.0.add(index) };
        // SAFETY: writable by this function's contract.
        unsafe { element.write(value) };
    }
}

/// A NUL-terminated string that a C caller hands over. As with [`Out`], Rust code cannot make one.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// Copies the text; `INVALID_VALUE` if the pointer is null.
    pub(crate) fn read(&self) -> Outcome<String> {
        if self.0.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: not null; the C caller of a string parameter hands over NUL-terminated text that
        // lives for the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_mem_bytes: u32,
    pub(crate) stream: Handle,
    pub(crate) attributes: *const LaunchAttribute,
    pub(crate) attribute_count: u32,
}

/// `CUlaunchAttribute`: 64 bytes of value, aligned as a pointer is.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(crate) struct LaunchAttribute {
    pub(crate) id: c_int,
    pub(crate) pad: [u8; 4],
    pub(crate) value: [u32; 16],
}

impl LaunchConfig {
    /// Copies the attributes.
    ///
    /// # Safety
    /// As `cuda.h` says: `attributes` has `attribute_count` elements.
    pub(crate) unsafe fn attributes(&self) -> Vec<LaunchAttribute> {
        let count = usize::try_from(self.attribute_count).unwrap_or(0);
        if self.attributes.is_null() || count == 0 {
            return Vec::new();
        }
        // SAFETY: not null, and `count` elements by this function's contract.
        unsafe { std::slice::from_raw_parts(self.attributes, count) }.to_vec()
    }
}
