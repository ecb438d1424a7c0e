//! The functions of a static library or an object: their frames, and whom they call.

use std::collections::BTreeMap;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};
use object::read::archive::ArchiveFile;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionIndex, SymbolKind};

/// A function.
#[derive(Debug, Default)]
pub struct Function {
    /// Its number.
    pub number: usize,
    /// Its name, as Rust writes it.
    pub name: String,
    /// The most bytes that it takes of the stack.
    most: u64,
    calls: Vec<usize>,
    /// Whom it jumps to, in its own place.
    pub tail_calls: Vec<usize>,
    /// Whether it has a call whose target is in a register or in memory.
    pub calls_by_pointer: bool,
}

impl Function {
    /// Bytes of its frame, with the address that it returns to.
    pub fn frame(&self) -> u64 {
        self.most + 8
    }
}

/// The functions of a file.
#[derive(Debug)]
pub struct Code {
    /// All of them, by their numbers.
    pub functions: Vec<Function>,
}

/// Where a function is, by its member of the archive.
struct Place {
    section: SectionIndex,
    begin: u64,
    end: u64,
}

impl Code {
    /// Reads the objects of a static library, or one object. Panics where `file` is neither.
    pub fn read(file: &[u8]) -> Self {
        let members: Vec<_> = match ArchiveFile::parse(file) {
            Ok(archive) => {
                let data = archive.members().map(|member| member.unwrap().data(file).unwrap());
                data.filter_map(|data| object::File::parse(data).ok()).collect()
            }
            Err(_) => vec![object::File::parse(file).unwrap()],
        };
        let mut functions: Vec<Function> = Vec::new();
        let (mut places, mut by_name) = (Vec::new(), BTreeMap::new());
        for (member, file) in members.iter().enumerate() {
            for symbol in
                file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.size() > 0)
            {
                let Some(section) = symbol.section_index() else { continue };
                let (number, mangled) = (functions.len(), symbol.name().unwrap());
                let name = format!("{:#}", rustc_demangle::demangle(mangled));
                functions.push(Function { number, name, ..Function::default() });
                by_name.entry(mangled.to_owned()).or_insert(number);
                places.push((
                    member,
                    Place { section, begin: symbol.address(), end: symbol.address() + symbol.size() },
                ));
            }
        }
        let mut code = Self { functions };
        for number in 0..code.functions.len() {
            let (member, place) = &places[number];
            code.read_function(number, &members[*member], place, |to| match to {
                To::Name(name) => by_name.get(name).copied(),
                To::Here(section, at) => places.iter().position(|(other, place)| {
                    other == member && place.section == section && place.begin <= at && at < place.end
                }),
            });
        }
        code
    }

    fn read_function(
        &mut self,
        number: usize,
        file: &object::File<'_>,
        place: &Place,
        find: impl Fn(To<'_>) -> Option<usize>,
    ) {
        let section = file.section_by_index(place.section).unwrap();
        let relocations: BTreeMap<u64, object::Relocation> =
            section.relocations().filter(|(at, _)| (place.begin..place.end).contains(at)).collect();
        let bytes = section.data_range(place.begin, place.end - place.begin).unwrap().unwrap();
        let mut decoder = Decoder::with_ip(64, bytes, place.begin, DecoderOptions::NONE);
        let function = &mut self.functions[number];
        let (mut now, mut instruction) = (0_i64, Instruction::default());
        while decoder.can_decode() {
            decoder.decode_out(&mut instruction);
            assert!(!instruction.is_invalid(), "{} at {:#x}", function.name, instruction.ip());
            now -= taken(&instruction, &function.name);
            function.most = function.most.max(now.max(0) as u64);
            // A relocation of its last four bytes says where a call, or a jump, leads.
            let relocation =
                relocations.range(instruction.ip()..instruction.next_ip()).next_back().map(|(_, to)| to);
            let to = |relocation: &object::Relocation| match relocation.target() {
                RelocationTarget::Symbol(symbol) => {
                    let symbol = file.symbol_by_index(symbol).unwrap();
                    match symbol.section_index() {
                        Some(section) if symbol.kind() == SymbolKind::Section => {
                            // The place behind the instruction is what the processor counts from.
                            let at = relocation.addend() + 4;
                            find(To::Here(section, at as u64))
                        }
                        _ => find(To::Name(symbol.name().unwrap())),
                    }
                }
                _ => None,
            };
            match instruction.flow_control() {
                FlowControl::Call => match relocation {
                    Some(relocation) => function.calls.extend(to(relocation)),
                    None => {
                        function.calls.extend(find(To::Here(place.section, instruction.near_branch_target())))
                    }
                },
                FlowControl::IndirectCall => {
                    match relocation.filter(|_| instruction.is_ip_rel_memory_operand()) {
                        // By the table of addresses: as good as direct.
                        Some(relocation) => function.calls.extend(to(relocation)),
                        None => function.calls_by_pointer = true,
                    }
                }
                FlowControl::IndirectBranch => {
                    match relocation.filter(|_| instruction.is_ip_rel_memory_operand()) {
                        Some(relocation) => function.tail_calls.extend(to(relocation)),
                        None => function.calls_by_pointer = true,
                    }
                }
                FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
                    let target = match relocation {
                        Some(relocation) => to(relocation),
                        None => find(To::Here(place.section, instruction.near_branch_target())),
                    };
                    function.tail_calls.extend(target.filter(|target| *target != number));
                }
                _ => {}
            }
            // What follows the end of a way is reached from elsewhere, with all of the frame.
            let ends = matches!(
                instruction.flow_control(),
                FlowControl::Return
                    | FlowControl::UnconditionalBranch
                    | FlowControl::IndirectBranch
                    | FlowControl::Exception
            );
            if ends {
                now = function.most as i64;
            }
        }
    }

    /// Whom `function` calls.
    pub fn callees(&self, function: &Function) -> Vec<usize> {
        function.calls.clone()
    }
}

/// Where a call leads.
enum To<'a> {
    Name(&'a str),
    Here(SectionIndex, u64),
}

/// By how much an instruction raises the stack's pointer.
fn taken(instruction: &Instruction, name: &str) -> i64 {
    if instruction.mnemonic() == Mnemonic::Call {
        return 0;
    }
    let changes = instruction.stack_pointer_increment();
    if changes != 0 {
        return i64::from(changes);
    }
    let to_stack = instruction.op_count() > 1
        && instruction.op0_kind() == OpKind::Register
        && instruction.op0_register() == Register::RSP;
    if !to_stack {
        return 0;
    }
    let by = instruction.try_immediate(1).map(|by| by as i64);
    match (instruction.mnemonic(), by) {
        (Mnemonic::Sub, Ok(by)) => -by,
        (Mnemonic::Add, Ok(by)) => by,
        // Aligned down: at the most all but one word of the alignment goes.
        (Mnemonic::And, Ok(by)) => by + 8,
        // From the frame's pointer, at a function's end.
        (Mnemonic::Lea | Mnemonic::Mov | Mnemonic::Cmp | Mnemonic::Test, _) => 0,
        // By a register: more than a page, for which the compiler probes the stack. (What does that puts it back.)
        _ if name.contains("probestack") => 0,
        _ => -(1 << 20),
    }
}
