// error[E0050]: method `slot` has 1 parameter but the declaration in trait `gpu_await::GraphArg::slot` has 2
// fn slot(self) -> f32 { self.0 }

use gpu_await::*;

struct Wrapper(f32);

impl<'k> GraphArg<'k, f32> for Wrapper {
    fn slot(self) -> f32 { self.0 }
}
