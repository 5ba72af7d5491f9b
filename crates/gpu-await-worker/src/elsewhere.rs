//! Stand-ins for platforms other than Linux: a program compiles, and `spawn` is an error.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::marker::PhantomData;

use gpu_await::Device;

use crate::error::{Error, Result};
use crate::service::{Service, Services};

/// A [`Service`]'s view of its process. There is none on this platform.
#[derive(Debug)]
pub struct Host(Infallible);

impl Host {
    /// The device that the process was started for.
    #[must_use]
    pub fn device(&self) -> &Device {
        match self.0 {}
    }
}

/// The payloads of a call. There are none on this platform.
#[derive(Debug)]
pub struct Payloads(Infallible);

/// Does nothing on this platform, where `spawn` is an error.
pub fn init<S: Services>() {}

/// A [`Service`] in a process of its own. There is none on this platform.
#[derive(Debug)]
pub struct Worker<S: Service>(Infallible, PhantomData<fn() -> S>);

impl<S: Service> Worker<S> {
    /// Starts a builder with this configuration.
    pub fn builder(config: S::Config) -> WorkerBuilder<S> {
        drop(config);
        WorkerBuilder(PhantomData)
    }

    /// Makes a call.
    ///
    /// # Errors
    /// There is no worker that could be called.
    pub async fn call(&self, request: S::Request) -> Result<S::Response> {
        drop(request);
        match self.0 {}
    }
}

/// The options of a [`Worker`].
#[derive(Debug)]
#[must_use = "a builder does nothing until `spawn`"]
pub struct WorkerBuilder<S: Service>(PhantomData<fn() -> S>);

impl<S: Service> WorkerBuilder<S> {
    /// Fails.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub async fn spawn(self) -> Result<Worker<S>> {
        Err(Error::Unsupported { what: "Linux" })
    }
}
