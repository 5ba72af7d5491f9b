//! What no other test may load kernels beside: on a GPU these have the process for themselves, one after the other.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod alone;
    pub(crate) mod browser;
    pub(crate) mod cases;
    pub(crate) mod child;
    pub(crate) mod host_threads;
}

mod timeline;
mod timeline_events;
mod timeline_page;
