//! Services of one name: in a binary of its own, whose services are others'.

use futures::executor::block_on;
use gpu_await_worker::{Error, Failure, Host, Payloads, Service, Worker, init};

macro_rules! plus {
    ($name:ident, $plus:expr $(, $given:expr)?) => {
        #[derive(Debug)]
        pub(crate) struct $name;

        impl Service for $name {
            type Config = ();
            type Request = u32;
            type Response = u32;

            $(fn name() -> &'static str {
                $given
            })?

            async fn start((): (), _: &Host) -> Result<Self, Failure> {
                Ok($name)
            }

            async fn call(&self, x: u32, _: &mut Payloads) -> Result<u32, Failure> {
                Ok(x + $plus)
            }
        }
    };
}

plus!(One, 1, "plus");
plus!(Hundred, 100, "plus");
plus!(Thousand, 1000, "plus a thousand");

gpu_await_worker::test_main!(One, Thousand);

#[test]
fn services_of_one_name_are_refused() {
    let refused = std::panic::catch_unwind(init::<(One, Hundred)>);
    let panic = *refused.unwrap_err().downcast::<String>().unwrap();
    assert!(panic.contains("plus") && panic.contains("`Service::name`"), "{panic}");
    // The same one twice is one.
    gpu_await_worker_init();
    init::<(One, One)>();
    block_on(async {
        let one = Worker::<One>::builder(()).spawn().await.unwrap();
        let thousand = Worker::<Thousand>::builder(()).spawn().await.unwrap();
        assert_eq!((one.call(1).await, thousand.call(1).await), (Ok(2), Ok(1001)));
        // It has the name of a service that `init` names, and is another one.
        let hundred = Worker::<Hundred>::builder(()).spawn().await;
        assert!(matches!(hundred, Err(Error::NotRegistered { service: "plus" })), "{hundred:?}");
    });
}
