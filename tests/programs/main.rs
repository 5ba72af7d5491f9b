//! Whole programs: the main job, what users write and bring along, on every executor; and random ones beside a model.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod cases;
    pub(crate) mod child;
    pub(crate) mod completions;
    pub(crate) mod modes;
}

mod basics;
mod executors;
mod feature_examples;
mod front_page;
mod op_traits;
mod programs;
mod random_blocks;
mod random_overlaps;
mod random_programs;
mod runtimes;
mod simulation;
