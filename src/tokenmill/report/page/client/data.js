// Where rows come from: `FileData` decodes what the page carries, `ServedData` asks the server.
// Both give results to look through (`find`), whole rows (`row`), and rejected rows with their text.

async function inflated(text) {
  const packed = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const inflatedJson = async (text) => JSON.parse(lenient.decode(await inflated(text)));

// Seven bits a byte, the lowest first; the high bit says that more follow.
function varints(bytes) {
  const values = new Int32Array(bytes.length);
  let size = 0;
  let value = 0;
  let shift = 0;
  for (const byte of bytes) {
    value |= (byte & 127) << shift;
    shift += 7;
    if (byte < 128) {
      values[size++] = value;
      value = shift = 0;
    }
  }
  return values.subarray(0, size);
}

function running(steps) {
  let sum = 0;
  return steps.map((step) => (sum += step));
}

function maskOf(runs, length) {
  const mask = new Uint8Array(length);
  let at = 0;
  runs.forEach((run, n) => {
    if (n % 2) mask.fill(1, at, at + run);
    at += run;
  });
  return mask;
}

const PREVIEW_TOKENS = 48;
function previewOf(row) {
  const asked = row.turns.find((turn) => turn[0] === "user") || row.turns[0] || ["", 0, row.ids.length];
  const ids = [];
  for (let at = asked[1]; at < asked[2] && ids.length < PREVIEW_TOKENS; at++) {
    const picture = row.media.find((one) => one.start <= at && at < one.start + one.count);
    if (picture) at = picture.start + picture.count - 1;
    else ids.push(row.ids[at]);
  }
  let text = lenient.decode(joined(ids.filter((id) => !row.special(id)).map(row.piece)));
  text = text.replace(/\ufffd+$/, "").trimStart();
  if (text.startsWith(asked[0])) text = text.slice(asked[0].length);
  return text.split(/\s+/).filter(Boolean).join(" ").slice(0, 140);
}

const addressOf = (origin) => {
  const path = origin.path || "?";
  return origin.line === null ? `${path}#${origin.row}` : `${path}:${origin.line}`;
};

// Of an order by a number, as `highest:reward`: the direction and the name, which may hold anything.
const numberOrder = (order) => {
  const found = /^(highest|lowest):([^]*)$/.exec(order);
  return found ? [found[1], found[2]] : [null, null];
};

class FileData {
  constructor(about, rows) {
    this.overview = about.overview;
    this.selection = about.selection;
    this.compare = null;
    this.embedded = rows;
    this.blocks = new Map();
    this.texts = new Map();
  }

  async open() {
    const table = await inflatedJson(this.embedded.pieces);
    const encoder = new TextEncoder();
    const bytes = (piece) => (typeof piece === "string" ? encoder.encode(piece) : Uint8Array.from(piece));
    this.ids = table.ids;
    this.pieceOf = new Map(table.ids.map((id, n) => [id, bytes(table.pieces[n])]));
    this.specialIds = new Set(table.special);
    const { roles, drift, numbers, ...steps } = await inflatedJson(this.embedded.index);
    this.drift = drift;
    this.numbers = numbers;
    this.columns = Object.fromEntries(Object.entries(steps).map(([name, column]) => [name, running(column)]));
    this.roles = roles;
    this.size = roles.length;
    this.placeOf = new Map(this.columns.row.map((row, place) => [row, place]));
    // Rows stand in the order in which they were chosen; people expect that of the store.
    this.inOrder = this.columns.row.map((_, place) => place);
    this.inOrder.sort((a, b) => this.columns.row[a] - this.columns.row[b]);
  }

  // The rows of a block, decoded once.
  block(number) {
    if (!this.blocks.has(number)) this.blocks.set(number, this.decoded(number));
    return this.blocks.get(number);
  }

  async decoded(number) {
    const block = this.embedded.blocks[number];
    const [{ turns, runs, carried, findings, media, attached, groups }, numbers] = await Promise.all([inflatedJson(block.rows), inflated(block.ids)]);
    const ids = varints(numbers).map((at) => this.ids[at]);
    const first = number * this.embedded.block_rows;
    let start = 0;
    return turns.map((lengths, n) => {
      const known = this.known(first + n);
      const ends = running(lengths.map(([, tokens]) => tokens));
      const row = {
        ...known,
        ids: ids.subarray(start, start + known.length),
        mask: maskOf(runs[n], known.length),
        turns: lengths.map(([role, tokens], at) => [role, ends[at] - tokens, ends[at]]),
        carried: carried[n],
        findings: findings[n],
        media: media[n],
        attached: attached[n],
        group: groups[n],
      };
      start += known.length;
      return row;
    });
  }

  known(place) {
    const column = (name) => this.columns[name][place];
    const there = (name) => (column(name) < 0 ? null : column(name));
    const source = this.overview.sources[column("source")];
    const origin = {
      path: source ? source.path : null, row: column("source_row"), line: there("line"), offset: there("offset"), length: column("raw_length"),
    };
    return {
      row: column("row"),
      length: column("length"),
      trained: column("trained"),
      part: column("part"),
      source: column("source"),
      origin,
      address: addressOf(origin),
      drift: this.drift === null ? null : CLASSES[this.drift[place]] || null,
      numbers: Object.fromEntries(Object.entries(this.numbers).map(([name, values]) => [name, values[place]])),
      piece: (id) => this.pieceOf.get(id) || new Uint8Array(0),
      special: (id) => this.specialIds.has(id),
    };
  }

  async at(place) {
    const rows = await this.block(Math.floor(place / this.embedded.block_rows));
    return rows[place % this.embedded.block_rows];
  }

  async row(number) {
    const place = this.placeOf.get(number);
    return place === undefined ? null : this.at(place);
  }

  async text(place) {
    if (!this.texts.has(place)) {
      const row = await this.at(place);
      this.texts.set(place, lenient.decode(joined(Array.from(row.ids, row.piece))).toLowerCase());
    }
    return this.texts.get(place);
  }

  async find(query, progress, cancelled) {
    const { length, trained, source } = this.columns;
    const share = (n) => (length[n] ? trained[n] / length[n] : 0);
    const wantedDrift = query.drift ? CLASSES.indexOf(query.drift) : null;
    const number = this.numbers[query.number] || [];
    const least = (n) => number[n] !== null && number[n] >= query.numberLeast;
    const most = (n) => number[n] !== null && number[n] <= query.numberMost;
    let places = this.inOrder.filter((n) => (
      (wantedDrift === null || this.drift[n] === wantedDrift) &&
      (query.numberLeast === null || least(n)) &&
      (query.numberMost === null || most(n)) &&
      (query.source === null || source[n] === query.source) &&
      (!query.role || this.roles[n].includes(query.role)) &&
      (query.least === null || length[n] >= query.least) &&
      (query.most === null || length[n] <= query.most) &&
      (query.shareLeast === null || share(n) >= query.shareLeast - 1e-9) &&
      (query.shareMost === null || share(n) <= query.shareMost + 1e-9)
    ));
    if (query.text) {
      const needle = query.text.toLowerCase();
      const having = [];
      for (let n = 0; n < places.length; n++) {
        if ((await this.text(places[n])).includes(needle)) having.push(places[n]);
        if (n % 512 === 511) {
          progress(n / places.length, having.length);
          await new Promise((resume) => setTimeout(resume));
          if (cancelled()) return null;
        }
      }
      places = having;
    }
    const weights = {
      longest: (n) => -length[n],
      shortest: (n) => length[n],
      "least-trained": share,
      "most-trained": (n) => -share(n),
      drift: (n) => -this.drift[n],
    };
    const [direction, name] = numberOrder(query.order);
    const values = this.numbers[name];
    const sign = direction === "highest" ? -1 : 1;
    // Rows without the number come last in both directions.
    const weight = values ? (n) => (values[n] === null ? Infinity : sign * values[n]) : weights[query.order];
    if (weight) places.sort((a, b) => (weight(a) === weight(b) ? 0 : weight(a) - weight(b)));
    return {
      total: places.length,
      searched: this.size,
      of: this.size,
      load: async (first, last) => {
        const rows = await Promise.all(places.slice(first, last).map((place) => this.at(place)));
        for (const row of rows) if (row.preview === undefined) row.preview = previewOf(row);
        return rows;
      },
      place: async (number) => places.indexOf(this.placeOf.get(number)),
    };
  }

  async rejected(first, size, reason) {
    const rows = this.overview.rejected.rows.filter((row) => !reason || row.reason === reason);
    return rows.slice(first, first + size);
  }

  async rejectedRaw(row) {
    return row.raw;
  }

  async picture(row, one) {
    this.pictures = this.pictures || inflatedJson(this.embedded.pictures);
    return (await this.pictures)[one.digest];
  }

  raw() {
    return null; // a page carries no source rows
  }
}

class ServedData {
  constructor(about) {
    this.overview = about.overview;
    this.selection = about.selection;
    this.compare = about.compare;
    this.size = about.overview.totals.rows;
  }

  async open() {}

  async ask(name, given) {
    const url = new URL(`api/${name}`, document.baseURI);
    for (const [key, value] of Object.entries(given || {})) {
      if (value !== null && value !== undefined && value !== "") url.searchParams.set(key, value);
    }
    const answer = await fetch(url);
    const document_ = await answer.json();
    if (document_.error) throw new Error(document_.error.message);
    return document_;
  }

  async find(query) {
    const given = {
      source: query.source, role: query.role, least: query.least, most: query.most,
      share_least: query.shareLeast, share_most: query.shareMost, text: query.text,
      order: query.order, start: query.start || null, changed: query.changed ? 1 : null,
      drift: query.drift, number: query.number, number_least: query.numberLeast, number_most: query.numberMost,
    };
    const first = await this.ask("rows", { ...given, first: 0, count: 60 });
    return {
      total: first.total,
      searched: first.searched,
      of: first.of,
      load: async (from, to) => {
        const rows = [];
        for (let at = from; at < to; at += 200) {
          const part = await this.ask("rows", { ...given, first: at, count: Math.min(200, to - at) });
          rows.push(...part.rows);
        }
        for (const row of rows) {
          const source = this.overview.sources[row.source];
          const origin = { path: source ? source.path : null, row: row.source_row, line: row.line >= 0 ? row.line : null };
          row.address = addressOf(origin);
        }
        return rows;
      },
      place: async (number) => (await this.ask("place", { ...given, row: number })).place,
    };
  }

  dressed(row) {
    const table = new Map(Object.entries(row.table).map(([id, [bytes, special]]) => [Number(id), [fromHex(bytes), special]]));
    row.mask = maskOf(row.runs, row.length);
    row.piece = (id) => (table.get(id) || [new Uint8Array(0)])[0];
    row.special = (id) => Boolean((table.get(id) || [])[1]);
    return row;
  }

  async row(number) {
    if (number < 0 || number >= this.size) return null;
    return this.dressed(await this.ask("row", { number }));
  }

  async picture(row, one) {
    if (row.theirs) return { note: "a picture of the other store" };
    return this.ask("picture", { number: row.row, picture: row.media.indexOf(one) });
  }

  raw(number) {
    return this.ask("raw", { number });
  }

  async rejected(first, size, reason) {
    return (await this.ask("rejected", { first, count: size, reason })).rows;
  }

  rejectedRaw(row) {
    return this.ask("rejected-raw", { number: row.number });
  }

  async compared(number) {
    const both = await this.ask("compared", { number });
    this.dressed(both.ours);
    if (both.theirs) this.dressed(both.theirs).theirs = true;
    return both;
  }

  survey() {
    return this.ask("survey");
  }
}
