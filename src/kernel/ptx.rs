//! PTX as a sequence of statements (pure): as much of the language as is needed to tell what an entry executes, and in which order.
//!
//! Comments, strings and white space are read as the assembler reads them: an instruction may stand anywhere on a line, after labels, and in
//! several pieces. A directive that ends without a semicolon, such as `.loc`, ends where its operands do. Anything not understood is an error, so
//! that nothing hides after it.
//!
//! Nothing of the text is stored: texts can be megabytes long.
#![forbid(unsafe_code)]

use std::borrow::Cow;

/// A piece of an image in PTX.
#[derive(Debug)]
pub(super) enum Item<'t> {
    /// A target of the image, `sm_90` for example.
    Target(&'t str),
    /// A second name for a function.
    Alias,
    Function {
        name: &'t str,
        is_entry: bool,
        /// Whether its statements follow, up to [`Ends`](Item::Ends); otherwise it is only declared.
        has_body: bool,
    },
    Statement(Statement<'t>),
    /// The end of a function's body.
    Ends,
}

/// An instruction, without labels and declarations around it.
#[derive(Debug)]
pub(super) struct Statement<'t> {
    /// It has a guard predicate.
    pub(super) is_guarded: bool,
    /// With its suffixes, `ld.global.nc.f32` for example.
    pub(super) op: Cow<'t, str>,
    operands: &'t str,
    whole: &'t str,
}

impl<'t> Statement<'t> {
    /// The tokens of its operands, including brackets and commas.
    pub(super) fn operands(&self) -> impl Iterator<Item = &'t str> + use<'t> {
        let (text, mut at) = (self.operands, 0);
        std::iter::from_fn(move || {
            let token = token(text, at);
            at = token.end();
            (!token.text.is_empty()).then_some(token.text)
        })
    }

    /// Its text, on one line.
    pub(super) fn written(&self) -> String {
        self.whole.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// The start of the text that was not understood.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotUnderstood(pub(super) String);

/// Directives before an instruction that end with a semicolon.
const DECLARES: [&str; 9] = [
    ".branchtargets",
    ".callprototype",
    ".calltargets",
    ".const",
    ".global",
    ".local",
    ".param",
    ".reg",
    ".shared",
];

#[derive(Clone, Copy, Debug)]
struct Token<'t> {
    /// Empty at the end of the text, and where no token begins.
    text: &'t str,
    at: usize,
}

impl Token<'_> {
    fn end(self) -> usize {
        self.at + self.text.len()
    }
}

fn is_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_$%".contains(c)
}

/// The next token: a word, a word with a leading dot, `::`, a string, or a single character.
fn token(text: &str, mut at: usize) -> Token<'_> {
    step();
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        let word = |from: usize| {
            rest[from..].find(|c| !is_of_word(c)).map_or(rest.len(), |end| from + end)
        };
        let len = match first {
            _ if first.is_whitespace() => {
                at += first.len_utf8();
                continue;
            }
            '/' if rest.starts_with("//") => {
                at += rest.find('\n').unwrap_or(rest.len());
                continue;
            }
            '/' if rest.starts_with("/*") => match rest[2..].find("*/") {
                Some(end) => {
                    at += end + 4;
                    continue;
                }
                None => 0,
            },
            // A line marker of the preprocessor.
            '#' if rest[1..]
                .trim_start_matches([' ', '\t'])
                .starts_with(|c: char| c.is_ascii_digit()) =>
            {
                at += rest.find('\n').unwrap_or(rest.len());
                continue;
            }
            '"' => match rest[1..].find(['"', '\n']) {
                // Nothing specifies whether a quote after a backslash ends a string.
                Some(end)
                    if rest[1..][end..].starts_with('"') && !rest[..end + 1].ends_with('\\') =>
                {
                    end + 2
                }
                _ => 0,
            },
            '.' => word(1),
            ':' if rest.starts_with("::") => 2,
            _ if is_of_word(first) => word(0),
            _ if first.is_ascii_punctuation() && first != '#' => 1,
            _ => 0,
        };
        return Token { text: &rest[..len], at };
    }
    Token { text: "", at }
}

/// Counts the steps that a text takes, for tests.
#[inline]
pub(super) fn step() {
    #[cfg(test)]
    STEPS.set(STEPS.get() + 1);
}

#[cfg(test)]
thread_local! {
    pub(super) static STEPS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Reads an image from its beginning, or the statements of a body. Stops at the first thing that it does not understand.
pub(super) struct Reader<'t> {
    text: &'t str,
    next: Token<'t>,
    /// The number of open braces in a body.
    depth: usize,
    /// The last item was a target: more may follow.
    is_in_targets: bool,
    has_failed: bool,
}

impl<'t> Iterator for Reader<'t> {
    type Item = Result<Item<'t>, NotUnderstood>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        let item = self.item().map_err(|()| {
            self.has_failed = true;
            let line = self.text[self.next.at..].lines().next().unwrap_or_default();
            NotUnderstood(line.chars().take(60).collect())
        });
        item.transpose()
    }
}

impl<'t> Reader<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        let next = token(text, 0);
        Reader { text, next, depth: 0, is_in_targets: false, has_failed: false }
    }

    /// A second reader from the same position.
    pub(super) fn again(&self) -> Self {
        Reader { ..*self }
    }

    fn peek(&self) -> &'t str {
        self.next.text
    }

    fn take(&mut self) -> &'t str {
        let Token { text, .. } = self.next;
        if !text.is_empty() {
            self.next = token(self.text, self.next.end());
        }
        text
    }

    fn takes(&mut self, text: &str) -> bool {
        let is_there = self.peek() == text;
        if is_there {
            self.take();
        }
        is_there
    }

    fn word(&mut self) -> Result<&'t str, ()> {
        if !self.peek().starts_with(is_of_word) {
            return Err(());
        }
        Ok(self.take())
    }

    /// Skips a bracketed group, whose opening bracket is next.
    fn skip_brackets(&mut self) -> Result<(), ()> {
        let mut depth = 0_usize;
        loop {
            match self.take() {
                "(" | "{" | "[" => depth += 1,
                ")" | "}" | "]" => depth = depth.checked_sub(1).ok_or(())?,
                "" => return Err(()),
                _ => (),
            }
            if depth == 0 {
                return Ok(());
            }
        }
    }

    /// Skips past the next semicolon outside brackets; returns the semicolon's position.
    fn skip_statement(&mut self) -> Result<usize, ()> {
        let mut depth = 0_usize;
        loop {
            let at = self.next.at;
            match self.take() {
                "(" | "{" | "[" => depth += 1,
                ")" | "}" | "]" => depth = depth.checked_sub(1).ok_or(())?,
                ";" if depth == 0 => return Ok(at),
                "" => return Err(()),
                _ => (),
            }
        }
    }

    fn pragma(&mut self) -> Result<(), ()> {
        loop {
            if !self.take().starts_with('"') {
                return Err(());
            }
            if !self.takes(",") {
                break;
            }
        }
        self.takes(";");
        Ok(())
    }

    fn item(&mut self) -> Result<Option<Item<'t>>, ()> {
        if self.depth > 0 {
            return self.of_body().map(Some);
        }
        if std::mem::take(&mut self.is_in_targets) && self.takes(",") {
            return self.target().map(Some);
        }
        loop {
            match self.peek() {
                "" if self.next.at < self.text.len() => return Err(()),
                "" => return Ok(None),
                "{" => self.skip_brackets()?,
                ".target" => {
                    self.take();
                    return self.target().map(Some);
                }
                ".pragma" => {
                    self.take();
                    self.pragma()?;
                }
                ".entry" | ".func" => return self.function().map(Some),
                ".alias" => {
                    self.take();
                    return Ok(Some(Item::Alias));
                }
                _ => _ = self.take(),
            }
        }
    }

    fn target(&mut self) -> Result<Item<'t>, ()> {
        self.is_in_targets = true;
        self.word().map(Item::Target)
    }

    /// A function, from its directive to the brace that opens its body, or to its end.
    fn function(&mut self) -> Result<Item<'t>, ()> {
        let is_entry = self.take() == ".entry";
        if !is_entry && self.peek() == "(" {
            self.skip_brackets()?;
        }
        let name = self.word()?;
        loop {
            match self.peek() {
                "(" => self.skip_brackets()?,
                ".pragma" => {
                    self.take();
                    self.pragma()?;
                }
                end @ (";" | "{") => {
                    self.take();
                    let has_body = end == "{";
                    self.depth = usize::from(has_body);
                    return Ok(Item::Function { name, is_entry, has_body });
                }
                "" | "}" => return Err(()),
                _ => _ = self.take(),
            }
        }
    }

    /// The next item inside a body, after its opening brace.
    fn of_body(&mut self) -> Result<Item<'t>, ()> {
        while self.depth > 0 {
            match self.peek() {
                "{" => {
                    self.take();
                    self.depth += 1;
                }
                "}" => {
                    self.take();
                    self.depth -= 1;
                }
                ";" => _ = self.take(),
                ".loc" => self.location()?,
                ".pragma" => {
                    self.take();
                    self.pragma()?;
                }
                directive if DECLARES.contains(&directive) => _ = self.skip_statement()?,
                _ => {
                    if let Some(statement) = self.statement()? {
                        return Ok(Item::Statement(statement));
                    }
                }
            }
        }
        Ok(Item::Ends)
    }

    /// `.loc 1 5 3, function_name L + 4, inlined_at 1 9 5`
    fn location(&mut self) -> Result<(), ()> {
        let numbers = |reader: &mut Self| (0..3).try_for_each(|_| reader.word().map(drop));
        self.take();
        numbers(self)?;
        while self.takes(",") {
            match self.word()? {
                "function_name" => {
                    self.word()?;
                    if self.takes("+") {
                        self.word()?;
                    }
                }
                "inlined_at" => numbers(self)?,
                _ => return Err(()),
            }
        }
        Ok(())
    }

    /// A statement; none if it is a label.
    fn statement(&mut self) -> Result<Option<Statement<'t>>, ()> {
        let from = self.next.at;
        let is_guarded = self.takes("@");
        if is_guarded {
            self.takes("!");
            self.word()?;
        }
        let mut end = self.next.end();
        let mut op = Cow::Borrowed(self.word()?);
        if !is_guarded && self.takes(":") {
            return Ok(None);
        }
        let mut is_scope = false;
        while is_scope || self.peek().starts_with('.') || self.peek() == "::" {
            let next = self.next;
            if is_scope {
                self.word()?;
            } else {
                self.take();
            }
            match &mut op {
                // Still contiguous in the text.
                Cow::Borrowed(op) if end == next.at => *op = &self.text[end - op.len()..next.end()],
                op => op.to_mut().push_str(next.text),
            }
            (end, is_scope) = (next.end(), next.text == "::");
        }
        let to = self.skip_statement()?;
        let (operands, whole) = (&self.text[end..to], &self.text[from..to]);
        Ok(Some(Statement { is_guarded, op, operands, whole }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ops(body: &str) -> Vec<String> {
        let text = format!(
            ".version 8.0\n.target sm_90, debug\n.visible .entry it ( .param .u64 p ) .maxntid 1, 1, 1 {{\n{body}\n}}"
        );
        let mut items = Reader::new(&text).map(Result::unwrap);
        let mut next = || items.next().unwrap();
        assert!(matches!(next(), Item::Target("sm_90")));
        assert!(matches!(next(), Item::Target("debug")));
        let it = Item::Function { name: "it", is_entry: true, has_body: true };
        assert_eq!(format!("{:?}", next()), format!("{it:?}"));
        let mut ops = Vec::new();
        loop {
            match next() {
                Item::Statement(one) => ops.push(one.op.into_owned()),
                Item::Ends => break,
                other => panic!("{other:?}"),
            }
        }
        assert!(items.next().is_none());
        ops
    }

    #[test]
    fn statements_are_found_wherever_they_stand() {
        for body in [
            "st.global.u32 [%rd1], 7;",
            ".loc 1 1 1\nst.global.u32 [%rd1], 7;",
            ".loc 1 1 1, function_name $L__info + 4, inlined_at 1 2 3 st.global.u32 [%rd1], 7;",
            ".pragma \"a; ret; }\" st.global.u32 [%rd1], 7;",
            "/*/ ret; /* */ st.global.u32 [%rd1], 7;",
            "// ret; \r ret;\nst.global.u32 [%rd1], 7;",
            "mov : A: st/**/.global .u32 [%rd1], 7;",
            "{ .reg .b32 %r<3>; { @ ! %p1 st.global\n.u32 [%rd1], {7, 8}; } }",
            "# 1 \"a.cu\"\nst.global.u32 [%rd1], 7;",
            ".pragma \"/*\"; st.global.u32 [%rd1], 7; .pragma \"*/\";",
            ".shared .align 4 .b8 x[4] = {1, 2};\r\nst.global.u32 [%rd1], 7",
        ] {
            let body = if body.ends_with('7') { &format!("{body};") } else { body };
            assert_eq!(ops(body), ["st.global.u32"], "{body}");
        }
        assert_eq!(
            ops("ld.global.nc.L1::no_allocate .v2.f32 {%f1, %f2}, [%rd1+8];"),
            ["ld.global.nc.L1::no_allocate.v2.f32"]
        );
    }

    #[test]
    fn what_is_not_understood_is_said() {
        for (body, begins) in [
            (".unknown 1 2 st.global.u32 [%rd1], 7;", ".unknown"),
            (".file 1 \"a\"", ".file"),
            ("/* never ends", "/* never"),
            (".pragma \"a\\\"\"; ret;", "\"a"),
            ("#define x ret;", "#define"),
            ("ret", ""),
        ] {
            let text = format!(".entry it {{ {body} }}");
            let NotUnderstood(found) = Reader::new(&text).find_map(Result::err).unwrap();
            assert!(found.starts_with(begins), "{body}: {found}");
        }
    }

    #[test]
    fn functions_are_bodies_or_declarations() {
        let text = ".file 1 \".entry no { ret; }\"\n.extern .func (.param .b32 r) vprintf ( .param .b64 a );\n\
            .visible .entry it(.param .u64 p);\n.func f() { ret; }\n.section .debug { .b8 1 }\n\
            .visible .entry it(.param .u64 p) .pragma \"x\"; .reqntid 1 { .reg .b32 %r<2>; exit; }";
        let (mut found, mut statements) = (Vec::new(), 0);
        for item in Reader::new(text) {
            match item.unwrap() {
                Item::Function { name, has_body, .. } => found.push((name, has_body)),
                Item::Statement(_) => statements += 1,
                _ => (),
            }
        }
        assert_eq!(found, [("vprintf", false), ("it", false), ("f", true), ("it", true)]);
        assert_eq!(statements, 2);
    }
}
