// error[E0277]: `ViewMut2<'_, u8>` is not device memory that can be written as
// s.fill(rows, 7).queued()
// rows (`ViewMut2`) are written by `copy_2d`, a kernel, or `transform(transform!(|v| v), (value,), rows)`

use gpu_await::{Result, Stream, ViewMut2};

fn call(s: &Stream, rows: &mut ViewMut2<'_, u8>) -> Result<()> {
    s.fill(rows, 7).queued()
}
