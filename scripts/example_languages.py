"""Hand-written content of the bundled conversations: other languages, and code.

An *exchange* is a question and answer in another language with a follow-up; a *snippet* is a small
programming task with its solution and a follow-up. They cover several scripts and writing
directions, emoji of several code points, and text with significant white space.
"""

from __future__ import annotations

from typing import NamedTuple


class Exchange(NamedTuple):
    """Two turns in one language."""

    language: str
    question: str
    answer: str
    next_question: str
    next_answer: str


EXCHANGES = (
    Exchange(
        "zh", "为什么海水是咸的？",
        "河流把岩石中溶解的盐分带入大海，水分蒸发后盐留了下来，经过漫长的时间，海水就变咸了。",
        "那为什么湖水大多是淡的？",
        "多数湖泊有出口，盐分会随水流走。没有出口的湖，例如死海，就会变得很咸。",
    ),
    Exchange(
        "zh", "请用三句话介绍一下二分查找。",
        "二分查找在有序数组中寻找目标值。每一步都与中间元素比较，并排除一半的范围。"
        "因此它只需要大约 log₂(n) 次比较。",
        "如果数组没有排序呢？",
        "那就必须先排序，或者改用逐个比较的线性查找。",
    ),
    Exchange(
        "zh", "怎样煮出好吃的米饭？",
        "先把米淘洗两次，加入约为米量 1.2 倍的水，浸泡二十分钟，煮好后再焖十分钟。",
        "为什么要焖？",
        "焖的时候水汽会均匀地渗入米粒，米饭更松软，也不容易粘锅。",
    ),
    Exchange(
        "zh", "“画蛇添足”是什么意思？",
        "这个成语比喻做了多余的事，反而把原本完成的事情弄坏了。",
        "请造一个句子。",
        "这篇文章已经很完整了，再加一段解释就是画蛇添足。",
    ),
    Exchange(
        "de", "Warum ist der Himmel abends rot?",
        "Abends legt das Sonnenlicht einen längeren Weg durch die Luft zurück. Das blaue Licht "
        "wird dabei herausgestreut, übrig bleiben Gelb, Orange und Rot.",
        "Und warum ist er mittags nicht violett?",
        "Violettes Licht ist im Sonnenlicht schwächer, wird hoch oben teilweise verschluckt, und "
        "unser Auge ist dafür weniger empfindlich.",
    ),
    Exchange(
        "de", "Wie schreibt man »Straße« in Großbuchstaben?",
        "Üblich ist »STRASSE«; seit es das große Eszett gibt, ist auch »STRAẞE« zulässig.",
        "Gilt das auch in der Schweiz?",
        "Dort schreibt man ohnehin »Strasse« mit ss, die Frage stellt sich also nicht.",
    ),
    Exchange(
        "de", "Erkläre mir kurz, was ein Spaltentest beim Brückenbau prüft.",
        "Den Begriff kenne ich nicht als festen Fachausdruck. Meinst du den Spaltzugversuch? "
        "Er prüft die Zugfestigkeit von Beton, indem ein Zylinder längs zusammengedrückt wird.",
        "Ja, genau den meinte ich.",
        "Gut: Der Druck von oben und unten erzeugt quer dazu Zug, bis der Zylinder in der Mitte "
        "aufspaltet. Aus der Kraft folgt die Spaltzugfestigkeit.",
    ),
    Exchange(
        "de", "Nenne drei Verben mit trennbarer Vorsilbe.",
        "Zum Beispiel *ankommen*, *aufhören* und *vorlesen*: ich komme an, er hört auf, "
        "wir lesen vor.",
        "Und eines, das mal so, mal so geht?",
        "*Umfahren*: Ich fahre den Pfosten um, oder ich umfahre ihn. Letzteres ist zu empfehlen.",
    ),
    Exchange(
        "ar", "لماذا تبدو السماء زرقاء؟",
        "لأن الهواء يشتت الضوء الأزرق أكثر من الأحمر، فيصل إلى العين من كل الاتجاهات.",
        "ولماذا تحمر عند الغروب؟",
        "لأن الضوء يقطع مسافة أطول في الهواء، فيتشتت معظم الأزرق ويبقى الأحمر.",
    ),
    Exchange(
        "ar", "ما الفرق بين الطقس والمناخ؟",
        "الطقس هو حالة الجو الآن في مكان معين، أما المناخ فهو متوسط هذه الحالة خلال عشرات السنين.",
        "أعطني مثالًا.",
        "هطول المطر اليوم طقس، وكون المنطقة جافة عادةً مناخ.",
    ),
    Exchange(
        "ar", "كم عدد أضلاع المثمن؟",
        "للمثمن ثمانية أضلاع، ومجموع زواياه الداخلية 1080 درجة.",
        "كيف حسبت المجموع؟",
        "بالقاعدة (ن − 2) × 180، أي 6 × 180 = 1080.",
    ),
    Exchange(
        "fr", "Pourquoi met-on du sel dans l'eau des pâtes ?",
        "Pour le goût : les pâtes absorbent l'eau salée pendant la cuisson. L'effet sur la "
        "température d'ébullition est négligeable.",
        "Combien de sel faut-il ?",
        "Environ dix grammes par litre d'eau.",
    ),
    Exchange(
        "es", "¿Qué es un número primo?",
        "Un número entero mayor que uno que solo se divide por uno y por sí mismo, como 7 u 11.",
        "¿Por qué el 1 no lo es?",
        "Porque entonces la descomposición en factores primos no sería única.",
    ),
    Exchange(
        "ja", "「木漏れ日」とはどういう意味ですか。",
        "木の葉の間から差し込む日の光のことです。",
        "例文をください。",
        "森の道には、やわらかな木漏れ日が揺れていた。",
    ),
    Exchange(
        "ru", "Чем отличается вес от массы?",
        "Масса показывает, сколько вещества в теле, а вес — с какой силой оно давит на опору.",
        "А на Луне?",
        "Масса останется прежней, а вес станет примерно в шесть раз меньше.",
    ),
    Exchange(
        "hi", "जल चक्र क्या है?",
        "समुद्र का पानी भाप बनकर ऊपर उठता है, बादल बनाता है, और वर्षा के रूप में फिर धरती पर लौटता है।",
        "इसमें ऊर्जा कहाँ से आती है?",
        "मुख्य रूप से सूर्य से।",
    ),
    Exchange(
        "emoji", "Describe a rainy day in emoji only ☔",
        "🌧️☔👟💦➡️🏠☕📖😌",
        "And the sunny one after it 🙂",
        "🌤️🚲👩‍👧‍👦🌳🍦🏖️😎",
    ),
    Exchange(
        "emoji", "How many people are in 👨‍👩‍👧‍👦 and how many code points?",
        "Four people. It is one picture made of seven code points: four emoji joined by three "
        "zero-width joiners (U+200D).",
        "And 👍🏽?",
        "Two code points: the thumbs up 👍 and a skin tone modifier 🏽.",
    ),
)  # fmt: skip
"""Eight languages and emoji, each with a second turn."""


class Snippet(NamedTuple):
    """A small programming task."""

    language: str
    task: str
    code: str
    remark: str
    next_task: str
    next_answer: str


SNIPPETS = (
    Snippet(
        "python", "Write a function that says whether a string is a palindrome.",
        "def is_palindrome(text: str) -> bool:\n"
        "    letters = [c.lower() for c in text if c.isalnum()]\n"
        "    return letters == letters[::-1]",
        "It ignores case, spaces and punctuation.",
        "Add two assertions that test it.",
        "```python\nassert is_palindrome(\"Never odd or even\")\n"
        "assert not is_palindrome(\"tokenizer\")\n```",
    ),
    Snippet(
        "python", "How do I count the words of a file without reading it at once?",
        "from collections import Counter\n\n"
        "def count_words(path):\n    counts = Counter()\n"
        "    with open(path, encoding=\"utf-8\") as lines:\n"
        "        for line in lines:\n            counts.update(line.split())\n    return counts",
        "A file object yields its lines one by one, so memory holds one line and the counts.",
        "And the ten most frequent ones?",
        "`count_words(path).most_common(10)` returns them as pairs, most frequent first.",
    ),
    Snippet(
        "sql", "Select the three largest orders of every customer.",
        "SELECT customer_id, order_id, total\nFROM (\n"
        "    SELECT *, ROW_NUMBER() OVER (\n"
        "        PARTITION BY customer_id ORDER BY total DESC\n    ) AS place\n"
        "    FROM orders\n) AS ranked\nWHERE place <= 3;",
        "The window function numbers each customer's orders from the largest down.",
        "What if two orders have the same total?",
        "`ROW_NUMBER` picks one of them arbitrarily. Use `RANK()` to keep both, or add `order_id` "
        "to the `ORDER BY` to make the choice repeatable.",
    ),
    Snippet(
        "bash", "Find all files over 100 MB below the current directory.",
        "find . -type f -size +100M -exec ls -lh {} +",
        "`-exec … +` hands many names to one `ls`, which also copes with spaces in names.",
        "Only the names, sorted by size, please.",
        "```bash\nfind . -type f -size +100M -printf '%s\\t%p\\n' | sort -rn | cut -f2-\n```",
    ),
    Snippet(
        "python", "Merge two sorted lists into one sorted list.",
        "def merge(a, b):\n    merged, i, j = [], 0, 0\n"
        "    while i < len(a) and j < len(b):\n        if a[i] <= b[j]:\n"
        "            merged.append(a[i]); i += 1\n        else:\n"
        "            merged.append(b[j]); j += 1\n    return merged + a[i:] + b[j:]",
        "It looks at every element once, so it takes linear time.",
        "Is there something in the standard library?",
        "Yes: `list(heapq.merge(a, b))`. It works lazily and for any number of inputs.",
    ),
    Snippet(
        "javascript", "Debounce a function in JavaScript.",
        "function debounce(work, delay) {\n  let timer;\n  return (...args) => {\n"
        "    clearTimeout(timer);\n    timer = setTimeout(() => work(...args), delay);\n  };\n}",
        "Each call cancels the waiting one, so `work` runs once the calls have paused.",
        "When would I throttle instead?",
        "When you want regular updates while the calls go on, such as during scrolling. Debouncing "
        "waits for the end; throttling limits the rate.",
    ),
    Snippet(
        "json", "Give me a minimal JSON Schema for an object with a name and an optional age.",
        "{\n  \"type\": \"object\",\n  \"properties\": {\n    \"name\": {\"type\": \"string\"},\n"
        "    \"age\": {\"type\": \"integer\", \"minimum\": 0}\n  },\n  \"required\": [\"name\"]\n}",
        "`age` is optional because it is not listed under `required`.",
        "How do I forbid other members?",
        "Add `\"additionalProperties\": false` beside `required`.",
    ),
    Snippet(
        "regex", "A regular expression for a decimal number with an optional sign, please.",
        "^[+-]?(\\d+(\\.\\d*)?|\\.\\d+)$",
        "It accepts `7`, `-7.`, `+0.5` and `.5`, and refuses an empty string and a lone dot.",
        "Now allow an exponent.",
        "`^[+-]?(\\d+(\\.\\d*)?|\\.\\d+)([eE][+-]?\\d+)?$`",
    ),
    Snippet(
        "rust", "How do I read a file to a string in Rust and handle the error?",
        "use std::fs;\n\nfn main() {\n    match fs::read_to_string(\"notes.txt\") {\n"
        "        Ok(text) => println!(\"{} bytes\", text.len()),\n"
        "        Err(error) => eprintln!(\"cannot read: {error}\"),\n    }\n}",
        "`read_to_string` also fails when the file is not valid UTF-8.",
        "Shorter, if main may return an error?",
        "Let `main` return `std::io::Result<()>` and write "
        "`let text = fs::read_to_string(\"notes.txt\")?;`.",
    ),
    Snippet(
        "python", "Write a generator of the Fibonacci numbers.",
        "def fibonacci():\n    a, b = 0, 1\n"
        "    while True:\n        yield a\n        a, b = b, a + b",
        "It never ends by itself; take as many as you need with `itertools.islice`.",
        "Print the first eight.",
        "```python\nfrom itertools import islice\nprint(list(islice(fibonacci(), 8)))\n```\n"
        "This prints `[0, 1, 1, 2, 3, 5, 8, 13]`.",
    ),
    Snippet(
        "makefile", "Why does my Makefile say `missing separator`?",
        "build:\n\tcc -O2 -o tool tool.c",
        "The lines of a recipe must begin with a tab character, not with spaces, as shown.",
        "Can I choose another character?",
        "With GNU make, yes: `.RECIPEPREFIX = >` makes `>` the prefix.",
    ),
    Snippet(
        "c", "Swap two integers through pointers in C.",
        "void swap(int *a, int *b) {\n    int kept = *a;\n    *a = *b;\n    *b = kept;\n}",
        "Call it as `swap(&x, &y)`; the function changes what the pointers point at.",
        "Why not without pointers?",
        "C passes arguments by value, so the function would only swap its own copies.",
    ),
)  # fmt: skip
"""A dozen small programming tasks in several languages."""
