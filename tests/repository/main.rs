//! What holds of the sources, the documents and the packages. Needs the whole workspace, so it is not packaged.

mod dependencies;
mod features;
mod kernels_ptx;
mod layering;
mod mistakes;
