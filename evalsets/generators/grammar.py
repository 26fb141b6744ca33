#!/usr/bin/env python3
"""Write evalsets/tasks/grammar.jsonl: pairs of sentences of which only one is grammatical.

Run from the parent of evalsets:  python evalsets/generators/grammar.py
Only the standard library is used, and every choice that looks random is a rank
by SHA-256, so the file is the same on every machine and Python version.

How the tables read: P names the phenomenon for the families after it; F(family,
k, lines, slots) makes k pairs from each line. In a line, [good|bad] is where the
two sentences differ, {x} is a slot, and {x0} {x1} are the parts of a slot whose
values are written a/b.

A row: id, slice (the phenomenon), cluster (the family), context (the same for
all), choices (two sentences), answer (which of them is grammatical).
"""
import hashlib
import itertools
import json
import re
import sys
from pathlib import Path

SEED = "grammar-1"
OUT = Path(__file__).resolve().parent.parent / "tasks" / "grammar.jsonl"
PAIRS = []      # (phenomenon, family, good, bad)
PHENOMENON = None


def h(*key):
    return hashlib.sha256("\x1f".join((SEED, *key)).encode()).hexdigest()


def P(name):
    global PHENOMENON
    PHENOMENON = name


def fill(text, values):
    def sub(m):
        name = m.group(1)
        if name in values:
            return values[name]
        return values[name[:-1]].split("/")[int(name[-1])]
    return re.sub(r"\{(\w+)\}", sub, text)


def sentence(text):
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" ([.,?])", r"\1", text)
    return text[0].upper() + text[1:]


def F(family, k, lines, **slots):
    slots = {n: [v.strip() for v in vs.split(",")] for n, vs in slots.items()}
    used = {n: dict.fromkeys(vs, 0) for n, vs in slots.items()}
    taken = set()
    for line in [l.strip() for l in lines.strip().split("\n") if l.strip()]:
        names = [n for n in slots if re.search(rf"\{{{n}\d?\}}", line)]
        combos = [c for c in itertools.product(*[slots[n] for n in names])
                  if len({x for v in c for x in v.split("/")}) == sum(len(v.split("/")) for v in c)]
        for _ in range(k):
            # the combination whose values have been used least, ties by hash
            free = [c for c in combos if (line, c) not in taken]
            c = min(free, key=lambda c: (sum(used[n][v] for n, v in zip(names, c)), h(PHENOMENON, family, line, *c)))
            taken.add((line, c))
            for n, v in zip(names, c):
                used[n][v] += 1
            text = fill(line, dict(zip(names, c)))
            good = sentence(re.sub(r"\[([^|\]]*)\|([^\]]*)\]", r"\1", text))
            bad = sentence(re.sub(r"\[([^|\]]*)\|([^\]]*)\]", r"\2", text))
            PAIRS.append((PHENOMENON, family, good, bad))


NAMES = "Tom, Anna, Peter, Maria, David, Lucy, Mark, Emma"
MEN = "boy, king, uncle, monk, prince, waiter, grandfather, nephew"
WOMEN = "girl, queen, aunt, nun, princess, waitress, grandmother, niece"

# ====================================================================== agreement
P("agreement")
F("prepositional", 1, """
The key to the cabinets [is|are] missing.
The keys to the cabinet [are|is] missing.
The labels on the bottle [were|was] wet.
The path through the gardens [has|have] been closed.
The letters from the lawyer [surprise|surprises] nobody.
The letter from the lawyers [surprises|surprise] nobody.
The signs above the shop [look|looks] new.
The door to the offices on the upper floors [was|were] painted green.
The doors to the office on the upper floor [were|was] painted green.
The noise of the trucks near the markets [annoys|annoy] everyone.
The pictures on the wall of the church [show|shows] a battle.
The picture on the walls of the churches [shows|show] a battle.
""")
F("object_relative", 2, """
The {n0} that the {m1} like [is|are] very old.
The {n1} that the {m0} likes [are|is] very old.
The {n0} that the {m1} admire [has|have] left the town.
The {n1} that the {m0} admires [have|has] left the town.
The {n0} the {m1} know [lives|live] near the river.
The {n1} the {m0} knows [live|lives] near the river.
The {n0} that the {m1} met yesterday [was|were] very kind.
The {n1} that the {m0} met yesterday [were|was] very kind.
""", n="farmer/farmers, teacher/teachers, painter/painters, singer/singers",
  m="doctor/doctors, student/students, tourist/tourists, worker/workers")
F("subject_relative", 1, """
The {n0} who visited the farms [was|were] tired.
The {n1} who visited the farm [were|was] tired.
The {n0} who wrote these books [lives|live] abroad.
The {n1} who wrote this book [live|lives] abroad.
The {n0} who helped the nurses [has|have] gone home.
The {n1} who helped the nurse [have|has] gone home.
The {n0} that broke the windows [is|are] sorry.
The {n1} that broke the window [are|is] sorry.
""", n="woman/women, man/men, child/children, pilot/pilots")
F("one_of", 1, """
One of my cousins from the islands [works|work] in a bakery.
One of these stories about the kings [has|have] a sad ending.
Each of the rooms [has|have] a balcony.
Every one of the plates [is|are] dirty.
""")
F("inverted", 1, """
Where [are|is] the tickets that the boy bought?
Where [is|are] the ticket that the boys bought?
Behind the houses [stands|stand] a tall tree.
How often [do|does] the people in this village meet?
How often [does|do] the teacher of the children travel?
On the wall of the room [hang|hangs] two old clocks.
""")
F("parenthetical", 1, """
The teacher, like her students, [enjoys|enjoy] long walks.
The students, like their teacher, [enjoy|enjoys] long walks.
The actress, like her two sisters, [speaks|speak] French.
The sisters, like their mother, [speak|speaks] French.
""")

# ====================================================================== reflexives
P("reflexives")
F("embedded", 1, """
The {w} thinks that the {m} hurt [himself|herself].
The {m} thinks that the {w} hurt [herself|himself].
The {w} said that the {m} blamed [himself|herself].
The {m} said that the {w} blamed [herself|himself].
The {w} knew that the {m} had cut [himself|herself].
The {m} knew that the {w} had cut [herself|himself].
The {w} hopes that the {m} will protect [himself|herself].
The {m} hopes that the {w} will protect [herself|himself].
""", m=MEN, w=WOMEN)
F("possessor", 1, """
The girl's father introduced [himself|herself] to the guests.
The boy's mother introduced [herself|himself] to the guests.
The queen's brother taught [himself|herself] Latin.
The king's sister taught [herself|himself] Latin.
The woman's son dressed [himself|herself] for school.
The man's daughter dressed [herself|himself] for school.
The nun's uncle locked [himself|herself] in the cellar.
The monk's aunt locked [herself|himself] in the cellar.
""")
F("number", 1, """
The girls next to the {w} saw [themselves|herself] in the mirror.
The {w} next to the girls saw [herself|themselves] in the mirror.
The boys behind the {m} hid [themselves|himself] well.
The {m} behind the boys hid [himself|themselves] well.
The sisters of the {w} defended [themselves|herself].
The {m} with two brothers defended [himself|themselves].
The sons of the {m} blamed [themselves|himself].
The {w} with two daughters blamed [herself|themselves].
The brothers of the {m} taught [themselves|himself] to swim.
The {w} with three sisters taught [herself|themselves] to swim.
""", m=MEN, w=WOMEN)
F("person", 1, """
We taught [ourselves|themselves] to cook.
You and I should ask [ourselves|themselves] a question.
He asked us to help [ourselves|himself] to the cake.
I think that you should look after [yourself|myself].
You said that I had burned [myself|yourself].
She told us that they had lost [themselves|ourselves] in the forest.
""")
F("object_control", 1, """
The {m} asked the {w} to introduce [herself|himself].
The {w} asked the {m} to introduce [himself|herself].
The {m} told the {w} to defend [herself|himself].
The {w} told the {m} to defend [himself|herself].
The {m} persuaded the {w} to help [herself|himself].
The {w} persuaded the {m} to help [himself|herself].
The {m} heard the {w} praise [herself|himself].
The {w} heard the {m} praise [himself|herself].
""", m=MEN, w=WOMEN)
F("relative_clause", 1, """
The {m} who met the {w} hurt [himself|herself].
The {w} who met the {m} hurt [herself|himself].
The {m} that the {w} admires taught [himself|herself] to paint.
The {w} that the {m} admires taught [herself|himself] to paint.
The {m} whom the {w} invited enjoyed [himself|herself].
The {w} whom the {m} invited enjoyed [herself|himself].
The {m} who helped the {w} had burned [himself|herself].
The {w} who helped the {m} had burned [herself|himself].
The {m} the {w} called had locked [himself|herself] in.
The {w} the {m} called had locked [herself|himself] in.
""", m=MEN, w=WOMEN)

# ====================================================================== polarity
P("polarity")
F("ever", 1, """
[None|Most] of the visitors have ever seen snow.
[Nobody|Everybody] in the village has ever met the owner.
[Few|Many] people have ever climbed this mountain.
The old man has [never|often] told anyone his name.
""")
F("any", 1, """
The baker [never|often] sells any bread on Sunday.
There [isn't|is] any milk in the kitchen.
He [rarely|usually] makes any mistakes.
We [didn't|did] see any stars last night.
""")
F("yet", 1, """
The train [hasn't|has] left yet.
The baby [isn't|is] awake yet.
The shops [aren't|are] open yet.
The plumber who fixed the sink [hasn't|has] sent a bill yet.
""")
F("scope", 1, """
[No child that the teachers|The child that no teachers] like has ever been late.
[No singer that the critics|The singer that no critics] praised has ever visited us.
[No book that the boys|The book that no boys] read has ever won a prize.
[No dog that the neighbors|The dog that no neighbors] own has ever bitten anyone.
[No player that the fans|The player that no fans] love has ever left the team.
[No picture that the tourists|The picture that no tourists] saw has ever been sold.
[No house that the builders|The house that no builders] finished has ever burned down.
[No horse that the farmers|The horse that no farmers] trained has ever lost a race.
Last year [no clerk that the managers|the clerk that no managers] hired was ever on time.
In this town [no shop that the tourists|the shop that no tourists] like has ever closed.
""")
F("only", 1, """
[Only|Even] {n} would ever say such a thing.
[Only|Even] the twins have ever opened this box.
[Only|Even] my mother has ever worn this ring.
In this family, [only|even] {n} has ever learned to drive.
We know that [only|even] the oldest workers have ever seen the owner.
I think that [only|even] a fool would ever believe this story.
She says that [only|even] {n} has ever beaten the champion.
It seems that [only|even] the cook has any time today.
""", n=NAMES)
F("conditional", 1, """
[If|Because] you ever visit Rome, you can stay with us.
[Unless|Because] anyone objects, the meeting is over.
[Before|After] anyone could speak, the door opened.
[If|Because] she ever comes back, we will tell her the truth.
""")
F("without", 1, """
She left the party [without|after] saying anything.
They crossed the desert [without|with] any water.
The clerk signed the paper [without|after] reading any of it.
I [doubt|know] that she has any money.
I [doubt|think] that he will ever finish the book.
It is [hardly|certainly] any warmer than yesterday.
She [denied|claimed] that she had ever met him.
The thief [denied|admitted] that he had taken any money.
""")
F("either", 1, """
Tom doesn't eat meat, and Anna doesn't [either|too].
Tom eats meat, and Anna does [too|either].
I can't drive, and my wife can't [either|too].
I can drive, and my wife can [too|either].
The shop isn't cheap, and the market isn't [either|too].
The shop is cheap, and the market is [too|either].
Her son never calls, and her daughter doesn't [either|too].
Nobody slept, and the baby didn't [either|too].
""")

# ====================================================================== tense
P("tense")
F("time_adverb", 1, """
Yesterday the {n} [visited|will visit] the museum.
Tomorrow the {n} [will visit|visited] the museum.
Last week the {n} [bought|will buy] a new car.
Next week the {n} [will buy|bought] a new car.
Last summer my parents [built|will build] a small boat.
Next summer my parents [will build|built] a small boat.
Two days ago the {n} [lost|will lose] a glove.
Two days from now the {n} [will sell|sold] the shop.
The {n} [sold|will sell] his shop the day before yesterday.
The {n} [will sell|sold] his shop the day after tomorrow.
The {n} [will marry|married] an old friend next month.
The {n} [married|will marry] an old friend last month.
""", n="nurse, actor, pilot, farmer, student, lawyer")
F("definite_past", 1, """
He [broke|has broken] his arm two years ago.
They [sold|have sold] the farm in 1998.
I [met|have met] the mayor yesterday.
The children [went|have gone] to bed at eight o'clock last night.
When [did you arrive|have you arrived] in London?
Shakespeare [wrote|has written] many plays before he died.
""")
F("since", 1, """
He [has lived|lives] in this house since 2015.
She [has worked|works] at the bank since last year.
They [have been|are] friends since their childhood.
We [have known|know] each other since March.
It [has rained|rains] every day since Monday.
The shop [has been|is] closed since the storm.
I [have owned|own] this bicycle for ten years now.
My aunt [has taught|teaches] French here since the war.
""")
F("past_perfect", 1, """
By the time the guests arrived, the cook [had|has] finished dinner.
When we got to the station, the train [had|has] already left.
He told us that he [had|has] seen a bear the day before.
After they [had|have] eaten, they went for a walk.
Before the war began, the family [had|has] moved to Canada.
By this time next year, she [will have|has] finished school.
""")
F("conditional", 1, """
If she had studied harder, she [would|will] have passed the exam.
If I had known, I [would|will] have called you.
If he were rich, he [would buy|will buy] a boat.
If the weather [is|will be] nice, we will eat outside.
As soon as she [arrives|will arrive], we will start.
I will wait here until the rain [stops|will stop].
Call me when you [get|will get] home.
We cannot leave before he [comes|will come] back.
""")
F("wish", 1, """
I wish I [knew|know] the answer.
She wishes she [had|has] more time.
I wish it [were|is] summer already.
He wishes he [could|can] speak French.
If only I [had|have] more money!
They wish they [lived|live] in a bigger house.
""")
F("sequence", 1, """
She was reading when the phone [rang|rings].
While he was sleeping, someone [stole|steals] his shoes.
When I was young, we [lived|live] near the sea.
As soon as the bell rang, the children [ran|run] outside.
""")

# ====================================================================== determiners
P("determiners")
F("demonstrative", 1, """
He painted this {a} and {b} [{n0}|{n1}] in one day.
He painted these {a} and {b} [{n1}|{n0}] in one day.
Who made that {a}, {b} [{n0}|{n1}]?
Who made those {a}, {b} [{n1}|{n0}]?
Nobody wants this {a} but {b} [{n0}|{n1}].
Nobody wants these {a} but {b} [{n1}|{n0}].
""", a="small, old, heavy", b="strange, ugly, expensive", n="lamp/lamps, box/boxes, mask/masks, chair/chairs, clock/clocks, knife/knives")
F("rare_plural", 1, """
We need a better [criterion|criteria] for this.
We need these [criteria|criterion] for the test.
This strange [phenomenon|phenomena] is not well known.
These strange [phenomena|phenomenon] are not well known.
This [crisis|crises] came as a surprise.
These [crises|crisis] came as a surprise.
The team has one good [hypothesis|hypotheses].
The team has two good [hypotheses|hypothesis].
A single [larva|larvae] was found in the jar.
Several [larvae|larva] were found in the jar.
They came to an [oasis|oases] in the desert.
They came to many [oases|oasis] in the desert.
""")
F("every", 1, """
Every [student|students] in the school got a prize.
Each [room|rooms] in the hotel has a balcony.
Both [teams|team] played well.
Either [answer|answers] is correct.
Neither [plan|plans] was good.
Many a [sailor|sailors] has drowned here.
Every other [week|weeks] she visits her aunt.
Every two [weeks|week] she visits her aunt.
""")
F("numeral", 1, """
The widow has one [child|children].
The widow has four [children|child].
He pulled out one bad [tooth|teeth].
He pulled out three bad [teeth|tooth].
We took a three-[day|days] trip to the coast.
She has a five-[year|years]-old son.
Two [thousand|thousands] people came to the concert.
It cost three [hundred|hundreds] dollars.
""")
F("a_an", 1, """
He is [an|a] honest man.
She wore [a|an] uniform.
It was [a|an] one-way street.
He made [a|an] U-turn on the bridge.
The doctor ordered [an|a] X-ray.
She is [an|a] FBI agent.
They bought [a|an] ewe and a ram.
He is [an|a] heir to the throne.
Her son is [an|a] 8-year-old boy.
It is [a|an] euphemism for death.
""")
F("mass", 1, """
She gave me [some|a] good advice.
There is [some|a] new furniture in the office.
He does [a lot of|many] research on bees.
We heard [some|a] bad news today.
That was [a|many] good piece of news.
They carried [their|these] luggage to the car.
""")

# ====================================================================== word order
P("word_order")
F("indirect_question", 1, """
I don't know where [the station is|is the station].
She asked me what [the time was|was the time].
Do you know who [that man is|is that man]?
He wonders why [the shop is|is the shop] closed.
Tell me how old [your sister is|is your sister].
Nobody remembers when [the war began|did the war begin].
I forgot what [he said|did he say].
We must find out where [they went|did they go].
She explained how [the machine works|does the machine work].
Can you tell me what [this word means|does this word mean]?
I am not sure how much [it costs|does it cost].
It is unclear who [her father was|was her father].
""")
F("adverb_object", 1, """
He [always reads the newspaper|reads always the newspaper] at breakfast.
My uncle [rarely visits us|visits rarely us] in winter.
She [speaks English well|speaks well English].
I [like this song very much|like very much this song].
They [have already sold the car|have sold already the car].
He [plays the piano badly|plays badly the piano].
She [wrote the letter carefully|wrote carefully the letter].
""")
F("inversion", 1, """
Never [have I|I have] seen such a mess.
Rarely [does she|she does] speak in public.
Seldom [had they|they had] been so happy.
Only then [did he|he did] understand the joke.
Under no circumstances [should you|you should] open this box.
Hardly [had we|we had] sat down when the bell rang.
Not only [did he|he did] lie, but he also stole.
Only once [has she|she has] been late.
Nowhere [have we|we have] seen such birds.
At no time [was he|he was] in danger.
Little [did they|they did] know about the storm.
Only after the war [could they|they could] return.
Not a word [did he|he did] say all day.
""")
F("particle", 1, """
She found a coin and [picked it up|picked up it].
The music was loud, so he [turned it off|turned off it].
He wrote a letter and then [tore it up|tore up it].
These shoes are old; [throw them away|throw away them].
""")
F("enough_such", 1, """
He is [old enough|enough old] to drive.
She didn't run [fast enough|enough fast] to win.
I have never heard [such a|a such] stupid idea.
It was [too big a|a too big] risk for us.
She is [as good a|an as good] singer as her mother.
It was [so old a|a so old] car that nobody wanted it.
""")
F("indefinite_adjective", 1, """
I want [something cold|cold something] to drink.
She met [someone famous|famous someone] at the party.
They are looking for [somewhere quiet|quiet somewhere] to live.
""")
F("question", 1, """
Why [did she|she did] leave so early?
What [are you|you are] doing in my room?
Where [has he|he has] hidden the money?
How many books [have you|you have] read this year?
Which train [should we|we should] take?
""")

# ====================================================================== argument structure
P("argument_structure")
F("preposition", 1, """
They [discussed|talked] the plan for hours.
They [talked|discussed] about the plan for hours.
He [reached|arrived] the village at night.
He [arrived|reached] at the village at night.
She [heard|listened] a strange noise.
She [listened|heard] to the radio.
We [watched|looked] the birds in the garden.
We [looked|watched] at the birds in the garden.
The soldiers [approached|walked] the bridge.
The soldiers [walked|approached] to the bridge.
I [answered|replied] the letter at once.
I [replied|answered] to the letter at once.
They [entered|went] the old church.
They [went|entered] to the old church.
""")
F("two_objects", 1, """
She [told|said] me a funny story.
The guide [showed|described] us the old church.
The teacher [told|explained] us the rules.
The company [offered|suggested] him a job.
The child [asked|demanded] me a question.
He [lent|borrowed] his friend some money.
She [sent|announced] them the news.
""")
F("no_object_allowed", 1, """
The magician [hid|vanished] the coin.
The noise [woke|slept] the baby.
The joke [amused|laughed] the crowd.
The manager [fired|resigned] the clerk.
The student [raised|rose] his hand.
The frost [killed|died] the flowers.
The news [shocked|arrived] the family.
The guard [took|disappeared] the key.
The dentist [removed|fell] the tooth.
The rain [spoiled|happened] the picnic.
""")
F("object_needed", 1, """
The dog [barked|chased] in the yard.
The old bridge [collapsed|destroyed] in the night.
The letter [arrived|sent] in the morning.
The boy [smiled|thanked] when he saw us.
We [ate|devoured] at noon.
The prices [rose|raised] last month.
The two men [talked|mentioned] for an hour.
The girl [waited|awaited] in the hall.
The old man [slept|wore] in his chair.
""")
F("clause", 1, """
She [wanted|hoped] him to come.
She [hoped|wanted] that he would come.
They [forced|insisted] him to sign the paper.
They [insisted|forced] that he sign the paper.
He [said|told] that he was hungry.
He [told|said] us that he was hungry.
We [persuaded|hoped] them to stay.
We [hoped|persuaded] that they would stay.
The doctor [advised|suggested] him to rest.
I [want|say] you to be happy.
They [expected|agreed] her to win.
""")

# ====================================================================== filler and gap
P("filler_gap")
F("gap_needs_wh", 1, """
I know [what|that] the {n} {v} at the market.
She remembered [what|that] the {n} {v} in the cellar.
We were told [what|that] the {n} {v} last night.
They found out [what|that] the {n} {v} in Paris.
""" * 3, n="boy, cook, thief, nurse, driver, clerk, girl, priest", v="bought, found, borrowed, carried, caught, wore")
F("no_gap_needs_that", 1, """
I know [that|what] the {n} {v} at the market.
She remembered [that|what] the {n} {v} in the cellar.
We were told [that|what] the {n} {v} last night.
They found out [that|what] the {n} {v} in Paris.
""", n="boy, cook, thief, nurse, driver, clerk, girl, priest",
  v="bought a coat, found a ring, stole a watch, borrowed a ladder, broke a vase, dropped a bottle")
F("resumptive", 1, """
This is the coat that my sister bought [in|it in] Paris.
The man that we met [on|him on] the train is a doctor.
The woman that they invited [to|her to] dinner is ill.
The books that I left [on|them on] the table are gone.
What did the cook put [in|it in] the soup?
Who did she invite [to|him to] the party?
Whose umbrella did you leave [in|it in] the taxi?
Who did the police arrest [in|him in] the bank?
How many apples did he pick [from|them from] the tree?
It was the red hat that she wore [to|it to] the wedding.
""")
F("stranded", 1, """
Which chair did she sit [on|]?
This is the house that he lives [in|].
The knife that she cut the bread [with|] was dull.
What are you looking [at|]?
The bed that I slept [in|] was hard.
Which friend did he travel to Spain [with|]?
The man that they were talking [about|] is my uncle.
The pen that he signed the paper [with|] is gone.
Which town do your parents live [in|]?
The stool that the child was standing [on|] broke.
Who did the boy hear a story [about|]?
The log that we sat [on|] was wet.
The question that he could not think of an answer [to|] was easy.
Which box did you put the keys [in|]?
""")
F("subject_gap", 1, """
The friend that {n} visited [lives|she lives] in Berlin.
The house that {n} built [is|it is] near the lake.
The boy who [broke|he broke] the window ran away.
Which guest [brought|she brought] these flowers?
What the boy broke [was|it was] a valuable vase.
""", n=NAMES)
F("object_missing", 1, """
The man [who built|built] this house is dead.
What did the boy [find|find a coin] under the bed?
Who did the nurse [help|help the child] yesterday?
Which song did the band [play|play a waltz] at the end?
The cake that she [baked|baked a pie] was delicious.
""")

# ====================================================================== islands
P("islands")
F("coordinate", 1, """
What did the cook serve [with|and] the rice?
Who did {n} see [with|and] the teacher?
What did the boy eat [with|and] the bread?
Which actor did they invite [with|and] his wife?
Who did the king meet [near|and] the queen?
What did {n} put [under|and] the lamp?
Which dog did the girl feed [before|and] the cat?
What did the thief steal [besides|and] the money?
Who did the police find [behind|and] the driver?
Which toy did the child want [after|and] the doll?
Who did they elect [after|and] the old mayor?
What do you drink [after|and] coffee?
""", n=NAMES)
F("left_branch", 1, """
Whose [car did you|did you car] borrow?
Whose [coat is she|is she coat] wearing?
How many [eggs did you|did you eggs] break?
How [tall is your|is your tall] brother?
""")
F("that_trace", 1, """
Who do you think [|that] will win the race?
Which boy did she say [|that] broke the window?
Who does he believe [|that] stole the money?
Which team do they hope [|that] will lose?
What did you say [|that] happened last night?
Who did they think [|that] wrote the letter?
Which horse do you suppose [|that] is the fastest?
Which of the guests did he claim [|that] had been rude?
What do they believe [|that] caused the fire?
Which singer do you hope [|that] will come?
""")
F("whether", 1, """
Which runner does the coach [think|wonder whether] will win the race?
Who do they [believe|wonder whether] stole the ring?
Who did the judge [think|ask why] was guilty?
Which guest did {n} [say|wonder when] would arrive?
Which letter did the clerk [claim|wonder whether] had come?
Which car did the police [believe|ask when] had been stolen?
""", n=NAMES)
F("adjunct", 1, """
Who did Anna [call after meeting Tom|call Tom after meeting]?
Who did Peter [thank before leaving Maria|thank Maria before leaving]?
Who did the nurse [help before calling the doctor|help the doctor before calling]?
Who did they [thank after visiting Maria|thank Maria after visiting]?
What did she [wash before selling the car|wash the car before selling]?
Who did the boss [fire without warning Peter|fire Peter without warning]?
Who did the lawyer [call before seeing the judge|call the judge before seeing]?
What did you [cook after cleaning the fish|clean the fish after cooking]?
Who did Lucy [forget after marrying David|forget David after marrying]?
What did the painter [sell before buying the frame|buy the frame before selling]?
Who did the spy [follow after meeting the guard|follow the guard after meeting]?
What did the boys [find while cleaning the barn|clean the barn while finding]?
Who did the teacher [praise while scolding Mark|scold Mark while praising]?
What did the tailor [make before washing the coat|wash the coat before making]?
""")
F("relative_island", 1, """
Which book did you [think the boy|see the boy who] read?
What did they [hope the girl|know the girl who] found?
Which letter did you [say the clerk|call the clerk who] lost?
What did {n} [say the thief|see the thief who] stole?
""", n=NAMES)

# ====================================================================== verb forms
P("verb_forms")
F("perfect", 1, """
The {n} had [drunk|drank] all the milk.
The {n} had, to our surprise, [drunk|drank] all the milk.
Has the {n} that you met [written|wrote] to you?
Has the {n} in the next room [eaten|ate] anything?
The concert had, as usual, [begun|began] late.
She had never before [sung|sang] this song.
Have you ever [swum|swam] in this lake?
She has often [swum|swam] across this river.
He had hardly [run|ran] a mile when he fell.
The prisoners have all [gone|went] home.
I would have [come|came] earlier.
The bell has not yet [rung|rang].
The ship had [sunk|sank] in the storm.
The dog had [sprung|sprang] over the fence.
He has [lain|lay] in bed all day.
My shirt has [shrunk|shrank] in the wash.
""", n="priest, waiter, sailor, butcher, stranger")
F("simple_past", 1, """
Yesterday the {n} [drank|drunk] all the milk.
In the end he [sang|sung] an old song.
The boys [swam|swum] across the lake.
The bell [rang|rung] at noon.
The choir [began|begun] to sing.
The lesson [began|begun] at nine.
""", n="priest, waiter, sailor, butcher, stranger")
F("reduced_relative", 1, """
The letter [written|wrote] by the priest was long.
The man [bitten|bit] by the dog went to the doctor.
The song [sung|sang] by the children was sad.
The coat [worn|wore] by my uncle was too small.
The money [stolen|stole] by the clerk was never found.
The stones [thrown|threw] by the boys hit a car.
The milk [drunk|drank] by the cat was sour.
The car [driven|drove] by the thief was red.
""")
F("do_support", 1, """
Did the man that we met yesterday [take|took] the money?
Does the girl who plays the drums [like|likes] jazz?
Does the man who lives upstairs [know|knows] your name?
Where does the woman who sells eggs [live|lives]?
Why did the boys who won the game [leave|left] early?
How often does the bus to the airport [run|runs]?
When did the old bridge [fall|fell] down?
Did your friends ever [find|found] their dog?
""")
F("modal", 1, """
The boy who sings can also [swim|swims] very well.
She must, if I am right, [be|is] the new nurse.
Should the woman who called [come|comes] in now?
He may already [have|has] lost his way.
Could the letter that came today [be|is] for me?
The children who were lost might [be|are] hungry.
""")
F("progressive", 1, """
Is the girl in the kitchen [writing|written] a letter?
I have been [waiting|waited] for an hour.
She will be [working|work] late tonight.
They may have been [sleeping|slept].
The house has just been [built|build].
The car was being [repaired|repair] when we came.
""")

# ====================================================================== complements
P("complements")
F("gerund_or_infinitive", 1, """
She [enjoys|wants] swimming in the lake.
She [wants|enjoys] to swim in the lake.
He [avoided|refused] answering the question.
He [refused|avoided] to answer the question.
They [finished|decided] painting the house.
They [decided|finished] to paint the house.
The clerk [denied|promised] taking the money.
The clerk [promised|denied] to take the money.
The man [pretended|kept] to be asleep.
The man [kept|pretended] talking about his dog.
They [suggested|agreed] taking the train.
They [agreed|suggested] to take the train.
""")
F("causative", 1, """
The teacher [made|forced] the boy apologize.
The teacher [forced|made] the boy to apologize.
My parents [let|allowed] me stay up late.
My parents [allowed|let] me to stay up late.
The rain [made|caused] the river rise.
The rain [caused|made] the river to rise.
The guard [let|permitted] the visitors enter.
The guard [permitted|let] the visitors to enter.
She [had|got] the plumber fix the sink.
The boy was made [to apologize|apologize] by his teacher.
The man was seen [to enter|enter] the bank.
""")
F("perception", 1, """
We saw the thief [run|to run] across the street.
I heard someone [knock|to knock] at the door.
She felt something [touch|to touch] her hand.
They watched the sun [set|to set] over the sea.
He noticed the girl [leave|to leave] the room.
We heard the old woman [cry|to cry] in the night.
""")
F("after_preposition", 1, """
He left without [saying|say] goodbye.
Instead of [eating|eat], he went fishing.
She is afraid of [flying|fly].
He insisted on [carrying|carry] the bag.
She apologized for [being|be] late.
They were accused of [stealing|steal] a horse.
""")
F("used_to", 1, """
I look forward to [seeing|see] you again.
She is used to [getting|get] up early.
We used to [live|living] near the sea.
They are not used to [eating|eat] so late.
She had better [leave|to leave] now.
He would rather [walk|to walk] than drive.
They are opposed to [building|build] a new road.
She is devoted to [helping|help] the poor.
He came close to [losing|lose] his leg.
You had better not [tell|to tell] anyone.
""")
F("adjective", 1, """
The old man was too tired [to walk|walking] home.
She was the first woman [to climb|climbed] the mountain.
The book is worth [reading|to read].
The film is not worth [seeing|to see].
He is old enough [to vote|voting].
They were busy [packing|to pack] their bags.
She had trouble [finding|to find] the house.
He spent an hour [looking|to look] for his keys.
""")

# ====================================================================== pronoun case
P("pronoun_case")
F("object_coordination", 1, """
The teacher praised [her|she] and {n}.
My uncle invited [him|he] and his wife.
The dog followed [them|they] and their children.
The guide helped [us|we] and the other tourists.
The teacher praised {n} and [her|she].
The police questioned the driver and [him|he].
The dog bit the mailman and [them|they].
""", n=NAMES)
F("preposition_coordination", 1, """
There is a secret between [him|he] and his sister.
The money was divided between [her|she] and her cousin.
The fight between [them|they] and their neighbors is over.
For [him|he] and his family, life was hard.
The letter was addressed to [her|she] and her husband.
It was a gift from my brother and [him|he].
She sat between the doctor and [them|they].
Most of [us|we] students live at home.
""")
F("exceptional_case", 1, """
The judge believes [them|they] to be guilty.
I expected [her|she] to win.
The rain made [us|we] wait.
With [him|he] gone, the house was quiet.
It is easy for [them|they] to say.
The plan was for [her|she] to sing first.
""")
F("embedded_subject", 1, """
We hope [he|him] finds a job.
The boy [she|her] likes is tall.
The house [they|them] bought is small.
After [he|him] left, it began to rain.
The man [we|us] know as the baker is a spy.
Whoever [they|them] choose will be happy.
The woman [he|him] said would come is ill.
""")
F("possessive", 1, """
This umbrella is [mine|my].
The red car is [theirs|their].
[Their|Theirs] house is bigger than ours.
A friend of [mine|my] lives in Rome.
The decision is [ours|our].
A cousin of [theirs|them] owns the hotel.
Our garden is next to [theirs|their].
That dog of [hers|her] bit me.
Some neighbors of [ours|us] have a boat.
His car is old, but [mine|my] is new.
""")
F("whose", 1, """
The woman [whose|who] car broke down is a nurse.
The boy [whose|whom] dog bit me ran away.
I don't know [whose|who] coat this is.
A child [whose|who] parents work is often alone.
The writer [whose|which] books you like is dead.
The house [whose|that] roof burned is ours.
She asked [whose|who] idea it was.
""")
F("reflexive_or_plain", 1, """
The king asked the queen to sit next to [him|himself].
The queen heard the king talk about [her|herself].
The aunt told the uncle to wait for [her|herself].
The boys think that the girl likes [them|themselves].
The waiter said that the nun had thanked [him|himself].
""")

# ====================================================================== quantifiers
P("quantifiers")
F("existential", 1, """
There was [a|every] lamp in the hall.
There is [no|each] reason to worry.
There are [many|most] hotels in this town.
There were [three|both] horses in the field.
There were [few|most] people at the concert.
There seem to be [many|most] errors in the book.
There have been [several|both] storms this year.
There stood [an|every] old tree in the garden.
""")
F("much_many", 1, """
She doesn't have [much|many] furniture.
She doesn't have [many|much] chairs.
There is too [much|many] noise here.
There are too [many|much] cars here.
We didn't get [much|many] information.
We didn't get [many|much] answers.
He spends as [much|many] of his money as he can.
He sells as [many|much] of his horses as he can.
""")
F("few_little", 1, """
There are only a [few|little] coins left.
There is only a [little|few] bread left.
He has very [little|few] money.
She eats [less|fewer] bread than he does.
Please add a [little|few] salt.
The [little|few] milk that we had was sour.
There was [little|few] hope of rain.
""")
F("of_the", 1, """
[None|No] of the cakes were left.
[Each|Every] of the boys has a bicycle.
[All|Every] the guests left early.
[Both|Each] my sisters are nurses.
[Most|Almost] of the children can swim.
[Most|The most] people like music.
[Half|Quarter] the apples were bad.
[All|Each] of the guests have left their coats here.
[Almost all|Almost] the windows were open.
[Nearly every|Nearly] house has a garden.
""")
F("no_none", 1, """
There were [no|none] tickets left.
I wanted a map, but there was [none|no].
He asked for sugar, but we had [none|no].
[No one|None one] answered the phone.
The others had coats, but she had [none|no].
Many tried, but [none|no] succeeded.
""")
F("other", 1, """
Would you like [another|other] cup of tea?
Some people like tea, and [others|other] like coffee.
The [other|others] children went home.
One shoe is here, but where is [the other|other]?
I don't like this hat; show me [another|other].
[Every|All] day of the week has a name.
""")
F("agreement", 1, """
Each of the boys [has|have] a bicycle.
All of the boys [have|has] a bicycle.
Everyone in the two teams [is|are] tired.
Most of the bottles [were|was] dirty.
Half of the cake [has|have] been eaten.
Half of the cakes [have|has] been eaten.
""")

# ====================================================================== comparatives
P("comparatives")
F("long_linker", 1, """
She has read more books about ships and sailors [than|as] I have.
She has read as many books about ships and sailors [as|than] I have.
He is far less interested in old coins and stamps [than|as] his wife.
He is just as interested in old coins and stamps [as|than] his wife.
It is much easier to learn a song [than|as] to write one.
It is just as hard to learn a song [as|than] to write one.
They sell cheaper bread at the market by the river [than|as] we do.
They sell bread as cheaply at the market by the river [as|than] we do.
The twins are more afraid of dogs [than|as] of cats.
The twins are as afraid of dogs [as|than] of cats.
""")
F("linker", 1, """
My sister is older [than|as] me.
My sister is as old [as|than] I am.
The film was less interesting [than|as] the book.
The film was not so interesting [as|than] the book.
Her hair is the same color [as|than] mine.
His answer was different [from|as] hers.
I would rather walk [than|as] drive.
No sooner had we left [than|as] it began to rain.
He had no other choice [than|as] to sell the farm.
""")
F("form", 1, """
My bag is [bigger|biggest] than yours.
This winter was [colder|coldest] than the last one.
The boy is as [tall|taller] as his father.
He runs as [fast|faster] as a horse.
This is the [oldest|older] building of all.
Which of the five boys is the [tallest|tall]?
Of the three roads, this one is the [shortest|short].
This is one of the [most|much] beautiful cities in Europe.
""")
F("double", 1, """
The train is [cheaper|more cheaper] than the plane.
This is the [easiest|most easiest] way.
The weather is getting [worse|more worse].
It is [far|more] colder here than at home.
It was [much|very] later than we thought.
Her house is [much|very] bigger than mine.
""")
F("degree", 1, """
The harder you work, [the more|more] you earn.
The [older|old] he gets, the less he sleeps.
He was [so|such] tired that he fell asleep.
It was [such|so] good weather that we went out.
The box is [too|so] heavy for him to lift.
She is [so|too] tall that she can touch the roof.
The soup was [so|too] salty that nobody ate it.
The soup was [too|so] salty to eat.
They were [such|so] good friends that they never fought.
He spoke [so|such] quietly that we heard nothing.
""")
F("adverb", 1, """
She sings more [beautifully|beautiful] than her sister does.
She answered more [politely|polite] than I had expected.
They fought [harder|more hard] than we had expected.
He knows the town [better|weller] than I do.
He behaves as [strangely|strange] as his father does.
They live more [happily|happy] than before.
The nurse spoke more [gently|gentle] than the doctor did.
""")

# ====================================================================== coordination
P("coordination")
F("paired", 1, """
Both the cat [and|or] the dog were asleep.
Either you [or|and] your brother must pay.
Neither the boss [nor|and] the clerk was there.
She speaks neither French [nor|and] Spanish.
He is both tired [and|or] hungry.
You can have either tea [or|and] coffee.
Neither rain [nor|but] snow could stop them.
Not only the boys [but|and] also the girls played.
[Neither|Either] Tom nor Anna came.
[Either|Neither] come in or go away.
The house with the red door is neither old [nor|and] large.
Both the man in the boat [and|or] his wife were wet.
Either the man in the boat [or|and] his wife is wrong.
It was neither the cook with the hat [nor|and] the waiter.
""")
F("gerunds", 1, """
He spends his time in the garden reading old books and [writing|write] letters.
I enjoy walking in the hills on cold days and [swimming|swim] in the sea.
Cooking for ten people and [cleaning|clean] the house take a lot of time.
We talked about buying an old boat and [sailing|sail] to Greece.
They enjoyed talking about the game and [singing|sing] old songs.
She is good at telling stories and [drawing|draw] horses.
""")
F("infinitives", 1, """
They decided to sell the old house and [move|moving] to Spain.
She hopes to finish school in June and [find|finding] a job.
It is better to give than to [receive|receiving].
You must wash the car and [clean|cleaning] the garage.
They can sing songs in French and [dance|dancing].
The doctor told him to stay in bed and [drink|drinking] tea.
To see the sea and to [hear|hearing] the birds was all he wanted.
""")
F("tense", 1, """
Every morning she gets up at six and [makes|made] coffee.
They came, looked around and [went|go] away.
She has washed the plates and [dried|dry] them.
The boy was caught in the garden and [punished|punish].
The letters were written by the clerk and [sent|sending] to his boss.
Has she written the letter and [gone|went] to the post office?
I have seen the film and [read|reading] the book.
""")
F("adjectives", 1, """
The soup was hot and [tasty|tastily].
He drove slowly and [carefully|careful].
She answered quickly and [politely|polite].
It was a long and [difficult|difficulty] journey.
He is known for his honesty and [courage|courageous].
They fought bravely and [fiercely|fierce].
The nurse spoke softly but [clearly|clear].
The children looked tired but [happy|happily].
""")
F("mixed", 1, """
She told him that she was ill and [that|what] she could not come.
He asked who I was and [what|that] I wanted.
They know who stole the ring and [why|which] he stole it.
The book is about ships and [about|of] sailors.
They were proud of their house and [of|for] their garden.
She asked how old I was and [where|that] I lived.
It depends on the weather and [on|of] the price.
He believes in hard work and [in|of] good luck.
""")

# ====================================================================== relative pronouns
P("relatives")
F("person_or_thing", 1, """
The nurse [who|which] helped us was very kind.
The bridge [which|who] crosses the river is old.
The boy [who|which] lost his shoe is crying.
My uncle, [who|which] lives in Rome, is a painter.
My house, [which|who] is near the sea, is small.
I lost the pen [which|who] you gave me.
The lawyers [who|which] wrote the contract are rich.
Anyone [who|which] wants to come must tell me.
""")
F("after_preposition", 1, """
The chair on [which|that] he sat was broken.
The knife with [which|that] he cut the rope was sharp.
The reason for [which|that] he came is unknown.
The doctor to [whom|that] I spoke was young.
The friends with [whom|that] she travels are French.
The people for [whom|that] he works are rich.
His sons, both of [whom|them] live in Spain, are rich.
Her books, most of [which|them] are lost, were very long.
The guests, none of [whom|them] spoke English, were tired.
The houses, one of [which|them] was empty, have been sold.
""")
F("where", 1, """
The town [where|which] she grew up is small.
The town [which|where] she hates is small.
This is the place [where|which] the king died.
This is the place [which|where] the king visited.
The hotel [where|which] we stayed was full.
The hotel [which|where] we chose was full.
The school [where|which] he taught has closed.
The school [which|where] he attended has closed.
The day [when|which] we met was a Monday.
That is the reason [why|which] he left.
The year [which|when] everyone remembers is 1945.
The island [which|where] they visited was hot.
""")
F("comma", 1, """
My father, [who|that] is eighty, still works.
Her car, [which|that] was new, broke down.
The Nile, [which|that] flows north, is a long river.
He came late, [which|what] made her angry.
She passed the test, [which|what] surprised us.
""")
F("what", 1, """
The book [that|what] I read was sad.
Everything [that|what] he said was true.
The only thing [that|what] matters is the truth.
I don't believe [what|which] you told me.
This is not the coat [that|what] I wanted.
[What|Which] she needs is a long rest.
All [that|what] he owned was a horse.
They did [what|that] they could.
""")
F("reduced", 1, """
The man [who lives|lives] next door is a baker.
The woman [who sold|sold] me this coat was rude.
The dog [that bit|bit] me was black.
The train [that leaves|leaves] at noon is full.
The girl [standing|stands] by the window is my niece.
The car [parked|parks] outside belongs to him.
The students [living|live] in this house are noisy.
The boy [carrying|carries] the bags is my son.
""")

# ====================================================================== tags and ellipsis
P("tags_ellipsis")
F("tag", 1, """
They left early, [didn't|weren't] they?
He can swim, [can't|doesn't] he?
The boys were noisy, [weren't|didn't] they?
She has finished, [hasn't|doesn't] she?
It rained last night, [didn't|wasn't] it?
Tom lives here, [doesn't|isn't] he?
You won't tell anyone, [will|do] you?
He doesn't smoke, [does|is] he?
They aren't ready, [are|do] they?
We should go, [shouldn't|don't] we?
""")
F("tag_polarity", 1, """
Nobody called, [did|didn't] they?
She never eats meat, [does|doesn't] she?
He hardly knows you, [does|doesn't] he?
It isn't raining, [is|isn't] it?
You can't swim, [can|can't] you?
They don't like us, [do|don't] they?
""")
F("tag_pronoun", 1, """
The mother of the boys was ill, wasn't [she|he]?
The sons of the queen are tall, aren't [they|she]?
The price of the shoes is high, isn't [it|they]?
The shoes in the box are new, aren't [they|it]?
""")
F("so", 1, """
Anna can swim, and so [can|does] her brother.
Tom likes music, and so [does|is] his wife.
The house is old, and so [is|does] the barn.
I have eaten, and so [have|do] the children.
They left early, and so [did|were] we.
She was tired, and so [was|did] her dog.
The girl who plays the drums is tall, and so [is|does] her sister.
The boy who is ill sings well, and so [does|is] his brother.
""")
F("neither", 1, """
Tom doesn't smoke, and [neither|so] does Anna.
I can't drive, and [neither|so] can my wife.
The shop isn't open, and [neither|so] is the bank.
They haven't eaten, and [neither|so] have we.
She won't come, and [neither|so] will her sister.
He didn't see it, and [neither|so] did I.
Tom smokes, and [so|neither] does Anna.
I can drive, and [so|neither] can my wife.
The shop is open, and [so|neither] is the bank.
She will come, and [so|neither] will her sister.
The cook never sleeps, and [neither|so] does the waiter.
My father hates cats, and [so|neither] does my mother.
""")
F("verb_phrase", 1, """
They said they would come, and they [did|were].
She said she was ill, and she [was|did].
Anna sings better than her sister [does|is].
You are taller than I [am|do].
She has more books than he [has|is].
He promised to write, but he never [did|was].
He is richer than his brother [was|did].
You work harder than I [do|am].
My wife drinks coffee, but I [don't|am not].
The boys were late, but the girls [weren't|didn't].
""")


def build():
    by_phen = {}
    for p, f, good, bad in PAIRS:
        by_phen.setdefault(p, []).append((f, good, bad))
    rows, seen, turn = [], set(), 0
    for p, pairs in by_phen.items():
        pos = {}
        for g in sorted((g + "\x1f" + b for _, g, b in pairs), key=lambda x: h("order", p, x)):
            pos[g] = turn % 2       # turn about over a shuffled order: half and half
            turn += 1
        for i, (f, good, bad) in enumerate(pairs):
            assert good != bad and (good, bad) not in seen, (good, bad)
            assert not re.search(r"[\[\]{}|]|  ", good + bad), (good, bad)
            seen.add((good, bad))
            a = pos[good + "\x1f" + bad]
            rows.append({"id": f"grammar-{p}-{i:03d}", "slice": p, "cluster": f"{p}/{f}",
                         "context": CONTEXT, "choices": [bad, good] if a else [good, bad], "answer": a})
    goods, bads = {r["choices"][r["answer"]] for r in rows}, {r["choices"][1 - r["answer"]] for r in rows}
    assert not goods & bads, goods & bads
    return rows


CONTEXT = ""


def main():
    rows = build()
    with OUT.open("w", encoding="utf-8", newline="\n") as f:
        for r in rows:
            f.write(json.dumps(r, ensure_ascii=False) + "\n")
    print(f"{OUT}: {len(rows)} rows, {len({r['cluster'] for r in rows})} clusters", file=sys.stderr)


if __name__ == "__main__":
    main()
