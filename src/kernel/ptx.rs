//! PTX as functions of statements (pure): as much of the language as it takes to say what an entry executes, in which order.
//!
//! Comments, strings and white space are read as the assembler reads them: an instruction may stand anywhere on a line, behind labels, and in
//! several pieces. A directive that ends with no semicolon, such as `.loc`, ends where its operands do. What is not understood is an error, so that
//! nothing hides behind it.
#![forbid(unsafe_code)]

/// What an image in PTX has.
#[derive(Debug, Default)]
pub(super) struct Ptx<'t> {
    /// What it is compiled for, `sm_90` for example.
    pub(super) targets: Vec<&'t str>,
    pub(super) functions: Vec<PtxFunction<'t>>,
    /// Functions have second names.
    pub(super) has_aliases: bool,
}

#[derive(Debug)]
pub(super) struct PtxFunction<'t> {
    pub(super) name: &'t str,
    pub(super) is_entry: bool,
    /// None of one that is declared only.
    pub(super) body: Option<Vec<Statement<'t>>>,
}

/// An instruction, without labels and declarations around it.
#[derive(Debug, Default)]
pub(super) struct Statement<'t> {
    /// It has a condition.
    pub(super) is_guarded: bool,
    /// With its suffixes, `ld.global.nc.f32` for example.
    pub(super) op: String,
    pub(super) operands: Vec<&'t str>,
    /// From where to where it stands in the text.
    span: (usize, usize),
}

impl Statement<'_> {
    /// As it stands in the text, on one line.
    pub(super) fn written(&self, text: &str) -> String {
        let written = text.get(self.span.0..self.span.1).unwrap_or_default();
        written.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// What begins there is not understood.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotUnderstood(pub(super) String);

/// Directives in front of an instruction that end with a semicolon.
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

#[derive(Clone, Copy)]
struct Token<'t> {
    text: &'t str,
    at: usize,
}

pub(super) fn read(text: &str) -> Result<Ptx<'_>, NotUnderstood> {
    let tokens = tokens(text).map_err(|at| not_understood(&text[at..]))?;
    let mut reader = Reader { tokens: &tokens, at: 0 };
    reader.image().map_err(|()| {
        let at = reader.tokens.get(reader.at).map_or(text.len(), |token| token.at);
        not_understood(&text[at..])
    })
}

fn not_understood(text: &str) -> NotUnderstood {
    NotUnderstood(text.lines().next().unwrap_or_default().chars().take(60).collect())
}

fn is_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_$%".contains(c)
}

/// Words, words with a dot in front, `::`, strings and single characters; where what is none of these begins.
fn tokens(text: &str) -> Result<Vec<Token<'_>>, usize> {
    let mut tokens = Vec::new();
    let mut at = 0;
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
            '/' if rest.starts_with("/*") => {
                at += rest[2..].find("*/").ok_or(at)? + 4;
                continue;
            }
            // Which line of another file comes next.
            '#' if rest[1..]
                .trim_start_matches([' ', '\t'])
                .starts_with(|c: char| c.is_ascii_digit()) =>
            {
                at += rest.find('\n').unwrap_or(rest.len());
                continue;
            }
            '"' => match rest[1..].find(['"', '\n']) {
                // Whether a quote behind a backslash ends a string is nowhere said.
                Some(end)
                    if rest[1..][end..].starts_with('"') && !rest[..end + 1].ends_with('\\') =>
                {
                    end + 2
                }
                _ => return Err(at),
            },
            '.' => word(1),
            ':' if rest.starts_with("::") => 2,
            _ if is_of_word(first) => word(0),
            _ if first.is_ascii_punctuation() && first != '#' => 1,
            _ => return Err(at),
        };
        tokens.push(Token { text: &rest[..len], at });
        at += len;
    }
    Ok(tokens)
}

struct Reader<'r, 't> {
    tokens: &'r [Token<'t>],
    at: usize,
}

impl<'t> Reader<'_, 't> {
    fn peek(&self) -> &'t str {
        self.tokens.get(self.at).map_or("", |token| token.text)
    }

    fn next(&mut self) -> &'t str {
        let text = self.peek();
        self.at += usize::from(!text.is_empty());
        text
    }

    fn takes(&mut self, text: &str) -> bool {
        let is_there = self.peek() == text;
        self.at += usize::from(is_there);
        is_there
    }

    fn word(&mut self) -> Result<&'t str, ()> {
        if !self.peek().starts_with(is_of_word) {
            return Err(());
        }
        Ok(self.next())
    }

    /// Behind what is in brackets, of which the first one is next.
    fn skip_brackets(&mut self) -> Result<(), ()> {
        let mut depth = 0_usize;
        loop {
            match self.next() {
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

    /// Behind the next semicolon that is in no brackets.
    fn skip_statement(&mut self) -> Result<Vec<&'t str>, ()> {
        let (from, mut depth) = (self.at, 0_usize);
        loop {
            match self.next() {
                "(" | "{" | "[" => depth += 1,
                ")" | "}" | "]" => depth = depth.checked_sub(1).ok_or(())?,
                ";" if depth == 0 => break,
                "" => return Err(()),
                _ => (),
            }
        }
        Ok(self.tokens[from..self.at - 1].iter().map(|token| token.text).collect())
    }

    fn pragma(&mut self) -> Result<(), ()> {
        loop {
            if !self.next().starts_with('"') {
                return Err(());
            }
            if !self.takes(",") {
                break;
            }
        }
        self.takes(";");
        Ok(())
    }

    fn image(&mut self) -> Result<Ptx<'t>, ()> {
        let mut ptx = Ptx::default();
        loop {
            match self.peek() {
                "" => return Ok(ptx),
                "{" => self.skip_brackets()?,
                ".target" => {
                    self.next();
                    ptx.targets.push(self.word()?);
                    while self.takes(",") {
                        ptx.targets.push(self.word()?);
                    }
                }
                ".pragma" => {
                    self.next();
                    self.pragma()?;
                }
                ".entry" | ".func" => {
                    let function = self.function()?;
                    ptx.functions.push(function);
                }
                ".alias" => {
                    self.next();
                    ptx.has_aliases = true;
                }
                _ => self.at += 1,
            }
        }
    }

    /// From its directive to its end.
    fn function(&mut self) -> Result<PtxFunction<'t>, ()> {
        let is_entry = self.next() == ".entry";
        if !is_entry && self.peek() == "(" {
            self.skip_brackets()?;
        }
        let name = self.word()?;
        loop {
            match self.peek() {
                "(" => self.skip_brackets()?,
                ".pragma" => {
                    self.next();
                    self.pragma()?;
                }
                ";" => {
                    self.next();
                    return Ok(PtxFunction { name, is_entry, body: None });
                }
                "{" => {
                    self.next();
                    return Ok(PtxFunction { name, is_entry, body: Some(self.body()?) });
                }
                "" | "}" => return Err(()),
                _ => self.at += 1,
            }
        }
    }

    /// Behind the bracket that opens it.
    fn body(&mut self) -> Result<Vec<Statement<'t>>, ()> {
        let (mut statements, mut depth) = (Vec::new(), 1);
        while depth > 0 {
            match self.peek() {
                "{" => {
                    self.next();
                    depth += 1;
                }
                "}" => {
                    self.next();
                    depth -= 1;
                }
                ";" => self.at += 1,
                ".loc" => self.location()?,
                ".pragma" => {
                    self.next();
                    self.pragma()?;
                }
                directive if DECLARES.contains(&directive) => drop(self.skip_statement()?),
                _ if self.tokens.get(self.at + 1).is_some_and(|next| next.text == ":") => {
                    self.word()?;
                    self.next();
                }
                _ => statements.push(self.statement()?),
            }
        }
        Ok(statements)
    }

    /// `.loc 1 5 3, function_name L + 4, inlined_at 1 9 5`
    fn location(&mut self) -> Result<(), ()> {
        let numbers = |reader: &mut Self| (0..3).try_for_each(|_| reader.word().map(drop));
        self.next();
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

    fn statement(&mut self) -> Result<Statement<'t>, ()> {
        let from = self.tokens.get(self.at).map_or(0, |token| token.at);
        let is_guarded = self.takes("@");
        if is_guarded {
            self.takes("!");
            self.word()?;
        }
        let mut op = self.word()?.to_owned();
        while self.peek().starts_with('.') || self.peek() == "::" {
            let is_scope = self.peek() == "::";
            op.push_str(self.next());
            if is_scope {
                op.push_str(self.word()?);
            }
        }
        let operands = self.skip_statement()?;
        let to = self.tokens.get(self.at - 1).map_or(from, |token| token.at);
        Ok(Statement { is_guarded, op, operands, span: (from, to) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ops(body: &str) -> Vec<String> {
        let text = format!(
            ".version 8.0\n.target sm_90, debug\n.visible .entry it ( .param .u64 p ) .maxntid 1, 1, 1 {{\n{body}\n}}"
        );
        let ptx = read(&text).unwrap();
        assert_eq!(ptx.targets, ["sm_90", "debug"]);
        let [function] = &ptx.functions[..] else { panic!("{ptx:?}") };
        assert!(function.is_entry && function.name == "it");
        function.body.as_ref().unwrap().iter().map(|one| one.op.clone()).collect()
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
            let NotUnderstood(found) = read(&text).unwrap_err();
            assert!(found.starts_with(begins), "{body}: {found}");
        }
    }

    #[test]
    fn functions_are_bodies_or_declarations() {
        let text = ".file 1 \".entry no { ret; }\"\n.extern .func (.param .b32 r) vprintf ( .param .b64 a );\n\
            .visible .entry it(.param .u64 p);\n.func f() { ret; }\n.section .debug { .b8 1 }\n\
            .visible .entry it(.param .u64 p) .pragma \"x\"; .reqntid 1 { .reg .b32 %r<2>; exit; }";
        let ptx = read(text).unwrap();
        let found = ptx.functions.iter().map(|one| (one.name, one.body.as_ref().map(Vec::len)));
        let all = [("vprintf", None), ("it", None), ("f", Some(1)), ("it", Some(1))];
        assert_eq!(found.collect::<Vec<_>>(), all);
    }
}
