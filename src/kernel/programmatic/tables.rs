//! [`Tables`]: which registers of a body hold addresses of CUDA's own tables (pure).
#![forbid(unsafe_code)]

use std::collections::HashMap;

use crate::kernel::ptx::{Item, Reader, Statement, step};

/// Whether it is the name of a table of CUDA's mathematical functions.
pub(super) fn is_named(name: &str) -> bool {
    name.starts_with("__cudart_")
}

/// The registers of a body that only ever hold addresses of tables, whatever the control flow: every instruction that writes one is a move,
/// from a table or from another such register.
#[derive(Default)]
pub(super) struct Tables<'t> {
    numbers: HashMap<&'t str, usize>,
    registers: Vec<Register>,
    moves: Vec<Move>,
}

#[derive(Default)]
struct Register {
    is_moved_to: bool,
    /// It holds something else as well, or nothing.
    is_other: bool,
    /// The moves from it.
    moves: Vec<usize>,
}

/// An instruction that moves addresses.
struct Move {
    to: Vec<usize>,
    /// How many of its sources are tables, as far as known.
    tables: usize,
}

impl<'t> Tables<'t> {
    /// From the statements up to the end of the body, which have parsed before.
    pub(super) fn of(body: Reader<'t>) -> Self {
        let mut tables = Tables::default();
        for item in body {
            let Ok(Item::Statement(one)) = item else { break };
            tables.enter(&one);
        }
        let is_none = |register: &Register| register.is_other || !register.is_moved_to;
        let numbers = 0..tables.registers.len();
        let mut others: Vec<usize> =
            numbers.filter(|number| is_none(&tables.registers[*number])).collect();
        others.iter().for_each(|number| tables.registers[*number].is_other = true);
        // Nor are registers that are moved only from these.
        let from_none = tables.moves.iter().filter(|one| one.tables == 0);
        let mut to_none: Vec<usize> = from_none.flat_map(|one| one.to.iter().copied()).collect();
        loop {
            for register in to_none.drain(..) {
                step();
                if !std::mem::replace(&mut tables.registers[register].is_other, true) {
                    others.push(register);
                }
            }
            let Some(other) = others.pop() else { return tables };
            for from in std::mem::take(&mut tables.registers[other].moves) {
                step();
                let one = &mut tables.moves[from];
                one.tables -= 1;
                if one.tables == 0 {
                    to_none.append(&mut one.to);
                }
            }
        }
    }

    fn enter(&mut self, statement: &Statement<'t>) {
        let is_move =
            matches!(statement.op.split('.').next(), Some("mov" | "cvta" | "add" | "mad"));
        let number = self.moves.len();
        let (mut one, mut is_source, mut depth) = (Move { to: Vec::new(), tables: 0 }, false, 0);
        for operand in statement.operands() {
            match operand {
                "{" => depth += 1,
                "}" => depth -= 1,
                "," if depth == 0 => is_source = true,
                name if !name
                    .starts_with(|c: char| c.is_ascii_alphabetic() || "_$%".contains(c)) => {}
                _ if is_source && !is_move => break,
                table if is_source && is_named(table) => one.tables += 1,
                name if is_source => {
                    one.tables += 1;
                    self.register(name).1.moves.push(number);
                }
                name => {
                    let (register, of_it) = self.register(name);
                    of_it.is_moved_to |= is_move;
                    of_it.is_other |= !is_move;
                    one.to.push(register);
                }
            }
        }
        if is_move {
            self.moves.push(one);
        }
    }

    fn register(&mut self, name: &'t str) -> (usize, &mut Register) {
        let number = *self.numbers.entry(name).or_insert_with(|| {
            self.registers.push(Register::default());
            self.registers.len() - 1
        });
        (number, &mut self.registers[number])
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.numbers.get(name).is_some_and(|number| !self.registers[*number].is_other)
    }
}
