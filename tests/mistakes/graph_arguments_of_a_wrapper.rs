// error[E0050]: method `slots` has 1 parameter but the declaration in trait `gpu_await::GraphArgs::slots` has 2
// fn slots(self) -> (f32,) { (self.0,) }

use gpu_await::*;

struct Wrapper(f32);

impl<'k> GraphArgs<'k, (f32,)> for Wrapper {
    fn slots(self) -> (f32,) { (self.0,) }
}
